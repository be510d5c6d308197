"""The files of a checkpoint: those of torch.distributed.checkpoint (DCP), whose tools read them.

DCP knows whole tensors and DTensors. Here a rank has boxes, any number of one tensor, so that the
plans are made here; writing, the format and the search for what overlaps are DCP's.

With NumPy a bare dcp.save would do: its ranks agree by object collectives, which need it, and hang
without. So each rank writes alone, and the first joins their tables of contents to what dcp.save
would have written.

A folder from somebody else can at worst fail to load: tensors are read with weights_only, and DCP's
table of contents, .metadata, through an unpickler that admits the classes of that table alone.
"""
import io
import math
import pickle
from pathlib import Path

import torch
from torch.distributed import checkpoint
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

# ---- writing -------------------------------------------------------------------


class Planner(checkpoint.DefaultSavePlanner):
    """Hands the writer the boxes that it asks for."""

    def __init__(self, boxes):
        super().__init__()
        self.boxes = boxes  # {where one belongs: the tensor}

    def lookup_object(self, index):
        return self.boxes[index]


def box_of(piece):
    return metadata.ChunkStorageMetadata(torch.Size(piece.start), piece.tensor.shape)


def write_boxes(folder, rank, pieces):
    """Writes this rank's boxes into FOLDER/__RANK_0.distcp -> their table of contents."""
    table = metadata.Metadata({}, storage_data={})
    boxes = {}
    items = []
    for piece in pieces:
        if not piece.writes or piece.tensor.numel() == 0:
            continue
        box = box_of(piece)
        index = metadata.MetadataIndex(piece.name, piece.start)
        properties = metadata.TensorProperties(dtype=piece.tensor.dtype)
        shape = torch.Size(piece.shape)
        add_boxes(table, piece.name, metadata.TensorStorageMetadata(properties, shape, [box]))
        data = planner.TensorWriteData(box, properties, shape)
        items.append(planner.WriteItem(index, planner.WriteItemType.SHARD, tensor_data=data))
        boxes[index] = piece.tensor
    # 0 bytes ahead: a tensor is copied to the CPU when its turn comes, without a stream of its own
    writer = checkpoint.FileSystemWriter(folder, per_thread_copy_ahead=0)
    writer.set_up_storage_writer(False, rank=rank, use_collectives=False)
    plan = writer.prepare_local_plan(planner.SavePlan(items))
    for written in writer.write_data(plan, Planner(boxes)).value():
        table.storage_data[written.index] = written.storage_data
    return table


def add_boxes(table, name, entry):
    """Adds an entry's boxes to those that a table has of a tensor."""
    known = table.state_dict_metadata.setdefault(name, entry)
    if known.size != entry.size:
        raise ValueError(f"{name} is {tuple(known.size)} and {tuple(entry.size)}")
    if known is not entry:
        known.chunks.extend(entry.chunks)


def joined(tables):
    """The tables of all ranks -> one. Raises ValueError unless each number is written once."""
    whole = metadata.Metadata({}, storage_data={}, version="1.0.0")
    for table in tables:
        whole.storage_data.update(table.storage_data)
        for name, entry in table.state_dict_metadata.items():
            add_boxes(whole, name, entry)
    for name, entry in whole.state_dict_metadata.items():
        written = sum(math.prod(box.sizes) for box in entry.chunks)
        if written != math.prod(entry.size):
            raise ValueError(f"{name} of {tuple(entry.size)} is not written exactly once: "
                             f"{written} of {math.prod(entry.size)} elements")
    return whole


# ---- reading -------------------------------------------------------------------


class Properties(metadata.TensorProperties):
    """Properties as any torch has written them: newer ones append what nothing here needs."""

    def __setstate__(self, state):
        super().__setstate__(state[:5])  # dtype, layout, requires_grad, memory format, pin_memory
        self.__class__ = metadata.TensorProperties  # as which it is pickled again


# {torch's name in the pickle of a table of contents: what it becomes here}
ADMITTED = {
    "torch.distributed.checkpoint.metadata.TensorProperties": Properties,
    "torch.distributed.checkpoint.filesystem._StorageInfo": filesystem._StorageInfo,
    "torch.serialization._get_layout": torch.serialization._get_layout,
    "torch.Size": torch.Size,
}
for _name in ("Metadata", "MetadataIndex", "TensorStorageMetadata", "ChunkStorageMetadata",
              "_MEM_FORMAT_ENCODING"):
    ADMITTED[f"torch.distributed.checkpoint.metadata.{_name}"] = getattr(metadata, _name)
ADMITTED.update((str(kind), kind) for kind in vars(torch).values() if isinstance(kind, torch.dtype))


class TableUnpickler(pickle.Unpickler):
    """Unpickles DCP's table of contents, and nothing that could run code."""

    def find_class(self, module, name):
        full_name = f"{module}.{name}"
        if full_name not in ADMITTED:
            raise pickle.UnpicklingError(f"{full_name} has no place in a table of contents")
        return ADMITTED[full_name]


def read_table(folder, name=".metadata"):
    """-> the Metadata in a file of DCP's. Raises ValueError if there is anything else in it."""
    with open(Path(folder, name), "rb") as file:
        try:
            table = TableUnpickler(file).load()
            for where in table.storage_data.values():
                if Path(where.relative_path).name != where.relative_path:
                    raise ValueError(f"{where.relative_path} is not in the folder")
        except Exception as error:  # damaged bytes can make an unpickler raise anything
            raise ValueError(f"{name}: {error}") from error
    return table


@torch.no_grad()
def load(folder, table, pieces):
    """Fills the pieces' tensors, whatever their dtype. Every rank reads what it needs, alone."""
    wanted = {}  # {a saved box: [(piece, what they have in common)]}: each is read once
    for piece in pieces:
        entry = table.state_dict_metadata[piece.name]
        found = create_read_items_for_chunk_list(piece.name, entry, [box_of(piece)])
        if sum(math.prod(item.lengths) for item in found) < piece.tensor.numel():
            raise ValueError(f"{folder}: not all of {piece.name} is there")
        for item in found:
            wanted.setdefault(item.storage_index, []).append((piece, item))
    for index, parts in wanted.items():
        saved = read_box(folder, table.storage_data[index])
        for piece, item in parts:
            target = narrow_tensor_by_index(piece.tensor, item.dest_offsets, item.lengths)
            target.copy_(narrow_tensor_by_index(saved, item.storage_offsets, item.lengths))


def read_box(folder, where):
    with open(Path(folder, where.relative_path), "rb") as file:
        file.seek(where.offset)
        data = io.BytesIO(file.read(where.length))
    return torch.load(data, map_location="cpu", weights_only=True)

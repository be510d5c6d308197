"""Boxes of tensors through torch.distributed.checkpoint (DCP), which knows whole tensors and
DTensors: a class with DCP's protocol for entries of a state dict. The files are DCP's own.

A folder from somebody else can at worst fail to load: tensors are read with weights_only, and DCP's
table of contents, .metadata, through an unpickler that admits the classes of that table alone.
"""
import logging
import pickle
import warnings
from pathlib import Path

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint import filesystem, metadata, planner

# DCP warns where a process is alone, and logs what its exceptions say again
warnings.filterwarnings("ignore", "torch.distributed is disabled")
logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)


class Boxes(torch.Tensor):
    """What this rank has of one tensor. .boxes: {start of a box: the box}"""

    @staticmethod
    def of(shape):
        found = torch.empty(()).expand(shape).as_subclass(Boxes)  # it has no memory
        found.boxes = {}
        return found

    def __create_chunk_list__(self):
        return [metadata.ChunkStorageMetadata(torch.Size(start), box.shape)
                for start, box in self.boxes.items()]

    def __create_write_items__(self, name, _):
        items = []
        for chunk, box in zip(self.__create_chunk_list__(), self.boxes.values()):
            properties = metadata.TensorProperties(dtype=box.dtype)
            data = planner.TensorWriteData(chunk, properties, self.size())
            where = metadata.MetadataIndex(name, chunk.offsets)
            items.append(planner.WriteItem(where, planner.WriteItemType.SHARD, tensor_data=data))
        return items

    def __get_tensor_shard__(self, index):
        return self.boxes[tuple(index.offset)]


def save(folder, pieces, group=None):
    """All ranks together. A box that several ranks hold is written once; .metadata comes last.

    Raises checkpoint.CheckpointException on every rank if one of them fails, or if the boxes are
    not the whole of each tensor.
    """
    state = {}
    for piece in pieces:
        if piece.writes and piece.tensor.numel():
            boxes = state.setdefault(piece.name, Boxes.of(piece.shape)).boxes
            boxes[tuple(piece.start)] = piece.tensor
    # 0 bytes ahead: a tensor is copied to the CPU when its turn comes, without a stream of its own
    writer = checkpoint.FileSystemWriter(folder, per_thread_copy_ahead=0)
    checkpoint.save(state, storage_writer=writer, process_group=group)


@torch.no_grad()
def load(folder, pieces):
    """Fills the pieces' tensors, whatever their dtype. Every rank reads what it needs, alone."""
    saved = table_of(folder)
    left = [piece for piece in pieces if piece.tensor.numel()]
    while left:
        state = {}
        again = []  # a second tensor for the same box: a tied copy, a master of what computes
        for piece in left:
            boxes = state.setdefault(piece.name, Boxes.of(saved[piece.name].size)).boxes
            if tuple(piece.start) in boxes:
                again.append(piece)
            else:
                boxes[tuple(piece.start)] = piece.tensor
        checkpoint.load(state, storage_reader=Reader(folder), no_dist=True)
        left = again


# what a table of contents is made of, by its name in the pickle
KINDS = (
    filesystem._StorageInfo, metadata.StorageMeta, metadata.Metadata, metadata.MetadataIndex,
    metadata.TensorStorageMetadata, metadata.ChunkStorageMetadata, metadata.TensorProperties,
    metadata._MEM_FORMAT_ENCODING, torch.serialization._get_layout, torch.Size,
)
ADMITTED = {f"{kind.__module__}.{kind.__name__}": kind for kind in KINDS}
ADMITTED |= {str(kind): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
ADMITTED |= {"pathlib.PosixPath": Path, "pathlib._local.PosixPath": Path}  # by Python's version


class TableUnpickler(pickle.Unpickler):
    def find_class(self, module, name):
        full_name = f"{module}.{name}"
        if full_name not in ADMITTED:
            raise pickle.UnpicklingError(f"{full_name} has no place in a table of contents")
        return ADMITTED[full_name]


class Reader(checkpoint.FileSystemReader):
    """DCP's, whose read_metadata would run any code that is in the file."""

    def read_metadata(self, *_, **__):
        """Raises OSError, or ValueError if there is anything else in the file."""
        with open(Path(self.path, ".metadata"), "rb") as file:
            try:
                table = TableUnpickler(file).load()
                names = {where.relative_path for where in table.storage_data.values()}
            except Exception as error:  # damaged bytes can make an unpickler raise anything
                raise ValueError(f".metadata: {error}") from error
        for name in names:
            if Path(name).name != name:
                raise ValueError(f".metadata: {name} is not in the folder")
        return table


def table_of(folder):
    """-> {name: what DCP's table of contents says of it}. Raises as read_metadata."""
    return Reader(folder).read_metadata().state_dict_metadata

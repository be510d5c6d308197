"""Tensors between ranks: each puts what it has made and takes what it needs, and none can deadlock. Needs only torch.

    rank 0   put(F0)  put(F1)  take(B0)  put(F2)  ..      route = [(F0, 0, 1), (F1, 0, 1), (B0, 1, 0), ..]
    rank 1   take(F0) put(B0)  take(F1)  put(B1)  ..               key, from rank, to rank: same on all

Every rank starts its transfers in the order of the route, in which none depends on a later one. A receive is started
long before its tensor is taken, so that it travels while both ranks compute; what is sent is kept until the next send.
"""
from collections import deque

import torch
import torch.distributed as dist


class Mail:
    """boundary: size, dtype and device of each of the tensors."""

    def __init__(self, route, group, boundary):
        self.rank, self.group, self.boundary = dist.get_rank(group), group, boundary
        self.route = [move for move in route if self.rank in move[1:]]
        dist.barrier(group)  # NCCL wants all ranks of a group in its first call, and not all are in a transfer

    def open(self, made):
        """Begin the route. made: {key: tensor} to be taken here."""
        self.todo, self.made, self.moving, self.sent = deque(self.route), made, {}, None
        self.communicate()

    def put(self, key, tensor):
        self.made[key] = tensor
        self.communicate()

    def take(self, key):
        """-> the tensor, None if no rank makes it."""
        return self.arrived(key) if key in self.moving else self.made.pop(key, None)

    def close(self):
        """Wait for the last send."""
        if self.sent:
            self.arrived(self.sent)
        self.sent = None

    def arrived(self, key):
        work, tensor = self.moving.pop(key)
        work.wait()
        return tensor

    def communicate(self):
        """Start transfers up to the first whose tensor is yet to be made here."""
        while self.todo and (self.todo[0][1] != self.rank or self.todo[0][0] in self.made):
            batch = [self.begin(*self.todo.popleft())]
            if self.todo and batch[0][1].op is dist.isend and self.todo[0][1] != self.rank:
                batch.append(self.begin(*self.todo.popleft()))  # one receive, since NCCL ends a batch as a whole
            works = dist.batch_isend_irecv([op for _, op in batch])
            for (key, op), work in zip(batch, (works[0], works[-1])):
                self.moving[key] = work, op.tensor

    def begin(self, key, sender, receiver):
        if sender != self.rank:
            into = torch.empty(**self.boundary)
            return key, dist.P2POp(dist.irecv, into, group=self.group, group_peer=sender)  # the sender's -> here too
        self.close()  # one send at a time: what has been sent is free
        out, self.sent = self.made.pop(key).contiguous(), key
        alike = out.shape == self.boundary["size"] and out.dtype == self.boundary["dtype"]  # else it hangs, or is noise
        assert alike, f"{key}: {out.dtype} {tuple(out.shape)}, not {self.boundary}"
        return key, dist.P2POp(dist.isend, out, group=self.group, group_peer=receiver)  # here -> the receiver's too


def gather(model, mine):
    """{name: tensor} of this rank -> of all ranks of model.group. model.homes: {name: (rank that has it, shape)}."""
    like, whole = next(iter(mine.values())), {}
    for rank in sorted({rank for rank, _ in model.homes.values()}):
        shapes = {name: shape for name, (home, shape) in model.homes.items() if home == rank}
        sizes = [shape.numel() for shape in shapes.values()]
        flat = torch.cat([mine[name].flatten() if name in mine else like.new_empty(size)
                          for name, size in zip(shapes, sizes)])
        dist.broadcast(flat, group=model.group, group_src=rank)  # on one rank -> replicated
        whole |= {name: part.view(shapes[name]) for name, part in zip(shapes, flat.split(sizes))}
    return whole

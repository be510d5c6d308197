"""Whoever drops a model gets its memory back: torch cannot collect what a hook of a parameter holds
in a circle."""
import gc
import weakref

import torch

import ddp
import fsdp
import hybrid_3d
import zero
from common import adamw
from conftest import run_ranks
from others import Llama, llama_loss, whole_batch
from pipeline_parallel import Chain, carve, make_plans
from tensor_parallel import TensorParallel

CHAIN = Chain(first=["embed_tokens"], layers="layers", last=["norm", "lm_head"],
              call=lambda forward, x: forward(x)["logits"])


def of_wrapper(model, wrap):
    wrapper = wrap(model)
    llama_loss(wrapper, *whole_batch(0)).backward()
    return wrapper


def of_zero(model, stage):
    wrapper = zero.STAGES[stage](zero.units_of(model, model.layers))
    llama_loss(model, *whole_batch(0)).backward()
    wrapper.reduce()
    wrapper.step(adamw(wrapper.parameter_groups(), 1e-2))
    return wrapper


def of_hybrid(model, level):
    mesh = hybrid_3d.Mesh(make_plans("1f1b", 1, 2), dp=2)
    hybrid = hybrid_3d.Hybrid(carve(model, CHAIN, [2]), mesh, TensorParallel(mesh.group["tp"]),
                              layers=model.layers, head=model.lm_head, zero=level)
    optimizer = adamw(hybrid.parameter_groups(), 1e-2)
    hybrid_3d.train_step(hybrid, optimizer, *whole_batch(0), torch.tensor(1), 1.0)
    return hybrid


CASES = ((of_wrapper, ddp.BucketedDDP), (of_wrapper, lambda model: fsdp.FSDP(model, model.layers)),
         *[(of_zero, stage) for stage in (1, 2, 3)], *[(of_hybrid, level) for level in (0, 1, 3)])


def check_freed():
    for train, *options in CASES:
        model = Llama(layers=2)
        wrapper = train(model, *options)
        found = [weakref.ref(of) for of in (model, wrapper, next(model.parameters()))]
        del model, wrapper
        gc.collect()
        assert [ref() for ref in found] == [None] * 3, f"{train.__name__}{tuple(options)}"


def test_dropped_models_are_freed():
    run_ranks(check_freed, 2)

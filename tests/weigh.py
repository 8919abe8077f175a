"""Trains a toy on forked ranks and prints their memory: `python tests/weigh.py RANKS PORT CONFIG [key=value ...]`.

The trainer and FSDP2 are the real ones; bytes are those of the storages behind every tensor, each counted once.
"""

import json
import os
import sys

from torch.profiler import ProfilerActivity, profile

from fsdp_pretrain.bench import steps
from fsdp_pretrain.config.config import load
from fsdp_pretrain.parallel import mesh


def held(tensors):
    storages = {}
    for tensor in tensors:
        storage = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def highest(live, step):
    """Highest sum of live bytes in a step, by the allocator's account; `live` bytes exist before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    peak = live
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def rank(config):
    with mesh.connect(config.parallel) as world:
        trainer = steps.build(config, world)
        gradients, forget = [], trainer.optimizer.zero_grad

        def weigh():
            gradients.append(held(parameter.grad for parameter in trainer.model.parameters()))
            forget()

        trainer.optimizer.zero_grad = weigh
        trainer.step()
        moments = [value for state in trainer.optimizer.state.values() for value in state.values()]
        line = {"parameters": held(trainer.model.parameters()), "gradients": gradients[0], "optimizer": held(moments)}
        trainer.optimizer.zero_grad = forget
        # The lowest of several steps: gloo sometimes still holds a buffer when the next is made.
        line["peak"] = min(highest(line["parameters"] + line["optimizer"], trainer.step) for _ in range(4))
        world.barrier()
        os.write(1, (json.dumps(line) + "\n").encode())  # whole lines, whatever the other ranks print


def main():
    ranks, port, path, *overrides = sys.argv[1:]
    config, children = load(path, overrides), []
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
    for number in range(int(ranks)):
        child = os.fork()
        if child == 0:
            os.environ.update(RANK=str(number), LOCAL_RANK=str(number))
            rank(config)
            os._exit(0)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(main())

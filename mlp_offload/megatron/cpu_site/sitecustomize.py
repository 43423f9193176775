"""On PYTHONPATH where there is no GPU: the CPU takes its place when a process first imports ``megatron``."""

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path


class ActivateCpuDevice:
    """An import hook that waits for ``megatron``, so that every other Python process pays nothing."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "megatron":
            sys.meta_path.remove(self)
            from mlp_offload.megatron.cpu_device import activate

            activate(announce=False)


sys.meta_path.insert(0, ActivateCpuDevice())

# The sitecustomize that this one hides, if there is one.
_here = Path(__file__).resolve().parent
_hidden = PathFinder.find_spec("sitecustomize", [p for p in sys.path if Path(p or ".").resolve() != _here])
if _hidden is not None and _hidden.loader is not None:
    _hidden.loader.exec_module(importlib.util.module_from_spec(_hidden))

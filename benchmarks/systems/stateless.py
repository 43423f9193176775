"""An optimizer without state that is never stepped: what forward and backward cost, and what a process takes at least."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.systems.worker import System, serve


class Stateless(System):
    def __init__(self, settings: "dict[str, Any]"):
        super().__init__(settings)
        self.optimizer = torch.optim.SGD(self.parameters)  # torch imports 140 MB of its compiler for any optimizer


if __name__ == "__main__":
    serve(Stateless)

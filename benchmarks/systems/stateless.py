"""No optimizer at all: what forward and backward cost, and what the process takes, without any."""

from benchmarks.systems.worker import System, serve


class Stateless(System):
    def update(self) -> None:
        """Nothing to do, nothing to keep."""


if __name__ == "__main__":
    serve(Stateless)

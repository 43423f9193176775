"""No optimizer at all: what forward and backward cost, and what the process takes, without any."""

from benchmarks.systems.worker import System, serve

if __name__ == "__main__":
    serve(System)

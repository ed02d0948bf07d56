"""The function of the launch benchmark, for methods that can't send one of the notebook."""

import os
import time


def work() -> None:
    """Note when the first line ran, as the notebook's function does."""
    now = time.monotonic_ns()
    rank = os.environ.get("RANK", "")
    with open(os.path.join(os.environ["BENCHMARK_FOLDER"], f"{rank}-{os.getpid()}"), "w", encoding="utf-8") as file:
        file.write(str(now))


def work_as(rank: int) -> None:
    """Work as the rank that the starter assigns."""
    os.environ["RANK"] = str(rank)
    work()


if __name__ == "__main__":
    import torch  # noqa: F401 - as every training script does before its first line of its own

    work()

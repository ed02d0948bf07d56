"""Ranks of a kernel that a scheduler has started know themselves, whatever a library reads to find out.

No scheduler runs here: the kernel has the variables that one would have set. The rules below are those by which
libraries decide which rank they are, each with the file that has it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping

import pytest

from notebook_accel import environment, notebook_launcher
from notebook_accel.launching.kernel.job import Job

# A notebook in an allocation of two nodes with four tasks each, of which it is one.
_SLURM = {
    "SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "jupyter", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2", "SLURM_NTASKS": "8", "SLURM_NPROCS": "8", "SLURM_NTASKS_PER_NODE": "4", "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_ID": "0",
}  # fmt: skip
_STARTED_BY = {
    "srun, with one task": _SLURM | dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_JOB_NUM_NODES"), "1")
    | dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), "0"),
    "srun, with eight tasks": _SLURM,
    "sbatch": {name: _SLURM[name] for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES")},
    "Open MPI": {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3",
                 "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_NODE_RANK": "3", "PMIX_RANK": "3"},
    "MPICH": {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4"},
    "jsrun": {"LSB_JOBID": "1", "LSB_DJOB_RANKFILE": "/none", "JSM_NAMESPACE_RANK": "3", "JSM_NAMESPACE_SIZE": "4",
              "JSM_NAMESPACE_LOCAL_RANK": "3", "JSM_NAMESPACE_LOCAL_SIZE": "4"},
    "Kubeflow": {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_RDZV_ENDPOINT": "job-worker-0:23456", "NODE_RANK": "1",
                 "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "2", "RANK": "1"},
    "SageMaker": {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1", "SM_NUM_GPUS": "0", "SM_TRAINING_ENV": "{}",
                  "SM_FRAMEWORK_PARAMS": "{}"},
    "torchrun": {"TORCHELASTIC_RUN_ID": "7", "TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RESTART_COUNT": "2",
                 "TORCHELASTIC_USE_AGENT_STORE": "False", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "ROLE_RANK": "3",
                 "ROLE_WORLD_SIZE": "4", "ROLE_NAME": "trainer", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"},
}  # fmt: skip

Rule = Callable[[Mapping[str, str]], tuple[int, int, int]]


def _lightning(environ: Mapping[str, str]) -> tuple[int, int, int]:
    """lightning/fabric/connector.py: torch elastic comes first. Without it Slurm, LSF and MPI are looked at."""
    assert "TORCHELASTIC_RUN_ID" in environ
    assert environ["GROUP_RANK"] == "0"
    return int(environ["RANK"]), int(environ["LOCAL_RANK"]), int(environ["WORLD_SIZE"])


def _ignite(environ: Mapping[str, str]) -> tuple[int, int, int]:
    """ignite/distributed/comp_models/native.py: Slurm's variables, which must not contradict torch's."""
    torchs = int(environ["RANK"]), int(environ["LOCAL_RANK"]), int(environ["WORLD_SIZE"])
    if "SLURM_JOB_ID" not in environ:
        return torchs
    slurms = int(environ["SLURM_PROCID"]), int(environ["SLURM_LOCALID"]), int(environ["SLURM_NTASKS"])
    assert slurms == torchs  # with one node more is allowed
    return slurms


def _composer(environ: Mapping[str, str]) -> tuple[int, int, int]:
    """composer/utils/dist.py."""
    assert environ.get("NODE_RANK", "0") == "0"
    assert environ["LOCAL_WORLD_SIZE"] == "2"
    return int(environ["RANK"]), int(environ["LOCAL_RANK"]), int(environ["WORLD_SIZE"])


def _deepspeed(environ: Mapping[str, str]) -> tuple[int, int, int]:
    """deepspeed/comm/comm.py: MPI is asked, unless all of these are there."""
    assert environ.keys() >= {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"}
    return int(environ["RANK"]), int(environ["LOCAL_RANK"]), int(environ["WORLD_SIZE"])


def _mpi(environ: Mapping[str, str]) -> tuple[int, int, int]:
    """mmengine/dist/utils.py with launcher="mpi", and scripts that know of Open MPI only."""
    names = {"OMPI_COMM_WORLD_RANK": "RANK", "OMPI_COMM_WORLD_LOCAL_RANK": "LOCAL_RANK"}
    names |= {"OMPI_COMM_WORLD_SIZE": "WORLD_SIZE"}
    rank, local_rank, size = (int(environ.get(name, environ[other])) for name, other in names.items())
    return rank, local_rank, size


def _accelerate(environ: Mapping[str, str]) -> tuple[int, int, int]:
    from accelerate.utils.environment import get_cpu_distributed_information  # its own

    with environment.patched(dict(environ)):
        found = get_cpu_distributed_information()
    return found.rank, found.local_rank, found.world_size


def _variables() -> dict[str, str]:
    return dict(os.environ)


_IN_EACH_RUN = ("srun, with eight tasks", "torchrun")


@pytest.mark.parametrize(
    "started_by",
    [name if name in _IN_EACH_RUN else pytest.param(name, marks=pytest.mark.slow) for name in _STARTED_BY],
)
def test_a_rank_knows_itself_by_every_librarys_rule(
    launch: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, started_by: str
) -> None:
    for name, value in _STARTED_BY[started_by].items():
        monkeypatch.setenv(name, value)
    for rank, environ in enumerate(launch(_variables).results(timeout_s=60)):
        for rule in (_lightning, _ignite, _composer, _deepspeed, _mpi, _accelerate):
            assert rule(environ) == (rank, rank, 2), rule.__name__
        unchanged = {"SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES", "SLURM_NNODES", "PMI_RANK"}
        unchanged |= {"PMIX_RANK", "PET_NODE_RANK", "SM_HOSTS", "LSB_JOBID"}
        hidden = _STARTED_BY[started_by].keys() - environ.keys()
        assert not hidden
        for name in unchanged & _STARTED_BY[started_by].keys():
            assert environ[name] == _STARTED_BY[started_by][name], name
        assert environ.get("SLURM_TASKS_PER_NODE", "2") == "2"
        assert environ["TORCHELASTIC_USE_AGENT_STORE"] == "True" and environ["TORCHELASTIC_RESTART_COUNT"] == "0"


def test_numbers_of_tasks_on_each_node() -> None:
    here = environment.tasks_of_schedulers({**_SLURM, "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1"})
    assert (here["SLURM_TASKS_PER_NODE"], here["SLURM_STEP_TASKS_PER_NODE"]) == ("2", "2")
    assert here["SLURM_STEP_NUM_NODES"] == "1"
    on_two_nodes = {**_SLURM, "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"}
    assert environment.tasks_of_schedulers(on_two_nodes)["SLURM_TASKS_PER_NODE"] == "4(x2)"


def test_names_of_tasks_come_only_from_a_scheduler(launch: Callable[..., Job]) -> None:
    for environ in launch(_variables, rdzv_id="mine").results(timeout_s=60):
        assert not [name for name in environ if name.startswith(("SLURM_", "OMPI_", "JSM_", "NODE_RANK"))]
        assert environ["TORCHELASTIC_RUN_ID"] == "mine"  # the option's name for it


def test_inline_the_kernel_is_a_rank_for_as_long_as_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in _SLURM.items():
        monkeypatch.setenv(name, value)
    before = _variables()
    with contextlib.redirect_stdout(None):
        [environ] = notebook_launcher(_variables, start_method="inline", use_cpu=True, view="none")
    assert (_lightning(environ), _ignite(environ)) == ((0, 0, 1), (0, 0, 1))
    assert _variables() == before

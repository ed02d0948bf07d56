"""Copies, shares and parts of models on several ranks train as a whole model does in one process."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # as everybody writes it
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from notebook_accel import Accelerator, ConfigError, FullyShardedDataParallelPlugin, ParallelismConfig, environment
from notebook_accel.errors import TrainingError
from notebook_accel.utils import set_seed
from tests.training import sharded_programs
from tests.training.ranks import Ranks, on_ranks
from tests.training.sharded_programs import Case, Writer

# Four ranks of a busy machine take their time to import what they need.
pytestmark = pytest.mark.timeout(400)
_DEADLINE_S = 150.0
_STEPS = 36  # an epoch has 32
_PARTS = {"tp_size": 2}
_SHARES_AND_PARTS = {"dp_shard_size": 2, "tp_size": 2}
_COPIES_AND_SHARES = {"dp_replicate_size": 2, "dp_shard_size": 2}
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(("ranks", "parallel"), [
    (2, _PARTS), slow(4, _SHARES_AND_PARTS), slow(4, _COPIES_AND_SHARES),
])  # fmt: skip
def test_losses_and_weights_are_those_of_one_process(
    groups: dict[int, Ranks], ranks: int, parallel: dict[str, int]
) -> None:
    """With accumulation, clipping, a schedule, groups of parameters, frozen ones and tied ones."""
    whole, divided = Case(sharded=False, window=2, groups=True), Case(window=2, groups=True, parallel=parallel)
    expected, weights = groups[1].run(sharded_programs.trained, whole, _STEPS)[0]
    by_rank = groups[ranks].run(sharded_programs.trained, divided, _STEPS, deadline_s=_DEADLINE_S)
    for losses, _ in by_rank:
        assert losses == pytest.approx(expected, rel=0, abs=1e-6)
    trained = by_rank[0][1]
    assert trained.keys() == weights.keys()
    for name, values in trained.items():
        assert torch.allclose(torch.tensor(values), torch.tensor(weights[name]), atol=1e-5), name
    assert expected[-1] < 0.8 * expected[0]


def train_with_dropout(precision: str) -> Any:
    """Train with dropout after the layers, and return losses, weights that stay whole, and what prepare has changed."""
    set_seed(5, device_specific=True)
    sizes = ParallelismConfig(tp_size=2)
    accelerator = Accelerator(cpu=True, mixed_precision=precision, parallelism_config=sizes)
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16), torch.nn.Dropout(), torch.nn.LayerNorm(16)
    )
    mesh = accelerator.torch_device_mesh["tp"]
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    samples: Any = sharded_programs.digits()[:64, :16] / 16
    loader: Any = DataLoader(samples, batch_size=16, shuffle=True)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    losses = []
    for _ in range(4):
        for x in loader:
            loss = F.mse_loss(model(x), x)
            accelerator.backward(loss)
            accelerator.clip_grad_value_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    whole = [parameter.tolist() for parameter in model[4].parameters()]
    return losses, whole, optimizer.param_groups[0]["foreach"], schedule.last_epoch


@pytest.mark.parametrize("precision", ["no", slow("bf16")])
def test_ranks_with_parts_stay_equal(two_ranks: Ranks, precision: str) -> None:
    """Their seeds differ at first, and what isn't cut into parts has no other tie between them."""
    (losses, whole, foreach, steps), of_rank_1 = two_ranks.run(train_with_dropout, precision, deadline_s=_DEADLINE_S)
    assert of_rank_1 == (losses, whole, foreach, steps)
    assert losses[-1] < 0.9 * losses[0]
    assert foreach is False  # torch can't update parts and whole parameters together
    assert steps == 16  # one a batch, though two ranks work on it


class Numbers(IterableDataset[torch.Tensor]):
    """A stream of numbers, to which each process adds random ones of its own."""

    def __iter__(self) -> Any:
        for number in range(10):
            yield torch.tensor(number + torch.rand(()).item() / 2)


def read_samples(parallel: dict[str, int]) -> Any:
    """Return the samples that a rank gets, with those of all ranks by each collective, and the random numbers after."""
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**parallel))
    set_seed(5, device_specific=True)
    noisy = [torch.tensor(number / 1.0) for number in range(10)]
    shuffled = accelerator.prepare(DataLoader(noisy, batch_size=2, shuffle=True))  # type: ignore[arg-type]
    streamed = accelerator.prepare(DataLoader(Numbers(), batch_size=2))
    own, gathered, for_metrics, sums, objects = [], [], [], [], []
    for loader in (shuffled, streamed):
        own.append([batch.tolist() for batch in loader])
        for batch in loader:
            whole = batch.floor().long()
            gathered.append(len(accelerator.gather(whole)))
            for_metrics += accelerator.gather_for_metrics(whole).tolist()
            objects += accelerator.gather_for_metrics([str(value) for value in whole.tolist()])
            sums.append(accelerator.reduce(torch.ones((), dtype=torch.int64), "sum").item())
    with accelerator.split_between_processes(["a", "b"]) as prompts:
        return own, gathered, for_metrics, sums, objects, prompts, torch.rand(2).tolist()


@pytest.mark.parametrize(("ranks", "parallel"), [(2, _PARTS), (4, _SHARES_AND_PARTS)], ids=str)
def test_ranks_with_parts_count_as_one(groups: dict[int, Ranks], ranks: int, parallel: dict[str, int]) -> None:
    """Loaders give them the same samples, and metrics have each sample once."""
    by_rank = groups[ranks].run(read_samples, parallel, deadline_s=_DEADLINE_S)
    batches = ranks // 2
    for rank, (own, gathered, for_metrics, sums, objects, prompts, drawn) in enumerate(by_rank):
        assert own == by_rank[rank - rank % 2][0]
        assert drawn == by_rank[rank - rank % 2][-1]
        assert set(gathered) == {2 * batches}
        assert sorted(for_metrics) == sorted([*range(10)] * 2)
        assert sorted(map(int, objects)) == sorted(for_metrics)
        assert set(sums) == {batches}
        assert prompts == (["a", "b"] if batches == 1 else ["ab"[rank // 2]])
    if batches > 1:
        assert by_rank[0][0] != by_rank[2][0]


@pytest.mark.parametrize(("ranks", "saved_as", "loaded_on", "loaded_as"), [
    (2, _PARTS, 1, {}),
    slow(1, {}, 2, _PARTS),
    slow(4, _SHARES_AND_PARTS, 2, _PARTS),
    slow(4, _COPIES_AND_SHARES, 4, _SHARES_AND_PARTS),
], ids=str)  # fmt: skip
def test_checkpoints_fit_any_division(
    groups: dict[int, Ranks],
    tmp_path: pathlib.Path,
    ranks: int,
    saved_as: dict[str, int],
    loaded_on: int,
    loaded_as: dict[str, int],
) -> None:
    folder = str(tmp_path / "state")
    saved, loaded = (Case(sharded=bool(parallel), groups=True, parallel=parallel) for parallel in (saved_as, loaded_as))
    (expected, losses), *_ = groups[ranks].run(sharded_programs.saved, folder, saved, deadline_s=_DEADLINE_S)
    (state, resumed), *_ = groups[loaded_on].run(sharded_programs.loaded, folder, loaded, deadline_s=_DEADLINE_S)
    assert state == expected
    assert resumed == pytest.approx(losses, rel=0, abs=1e-6)
    assert len(losses) == sharded_programs.RESUMED_STEPS


def gradient(accelerator: Accelerator) -> tuple[Any, torch.Tensor]:
    """Return a weight after a backward pass, and its whole gradient."""
    set_seed(3)
    net = accelerator.prepare(Writer())
    x = sharded_programs.digits()[accelerator.process_index :: 4][:8]
    accelerator.backward(F.cross_entropy(net(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()))
    up = accelerator.unwrap_model(net).blocks[0].up.weight
    return up, getattr(up.grad, "full_tensor", lambda: up.grad)()


@pytest.mark.parametrize(("variables", "strategy"), [
    ({"LOCAL_WORLD_SIZE": "2"}, "HYBRID_SHARD"),
    slow({"LOCAL_WORLD_SIZE": "2", "FSDP_SHARDING_STRATEGY": "HYBRID_SHARD_ZERO2"}, None),
    slow(
        {
            "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
            "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
            "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
        },
        None,
    ),
], ids=["strategy", "variable", "sizes"])  # fmt: skip
@on_ranks(4)
def test_each_copy_is_sharded_over_some_ranks(variables: dict[str, str], strategy: str | None) -> None:
    """Two nodes of two ranks have a copy each, or as many as variables say."""
    _, expected = gradient(Accelerator(cpu=True))
    with environment.patched(variables):
        accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(sharding_strategy=strategy))
    up, found = gradient(accelerator)
    assert accelerator.parallelism_config is not None
    assert accelerator.parallelism_config.sizes == {"dp_replicate": 2, "dp_shard": 2}
    assert len(up.to_local()) == len(up) / 2
    assert accelerator.data_parallel_rank == accelerator.process_index // 2
    assert torch.allclose(found, expected, atol=1e-6)


def train_on_own_mesh(shape: tuple[int, ...], loader_first: bool = False) -> list[float]:
    """Train a model that is cut, and with two dimensions sharded, over a mesh that this code makes itself."""
    set_seed(3)
    accelerator = Accelerator(cpu=True)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "parts")[2 - len(shape) :])
    model: Any = Writer()
    sharded_programs.cut_into_parts(model, mesh["parts"] if len(shape) > 1 else mesh)
    if len(shape) > 1:
        fully_shard(model, mesh=mesh["data"])
    optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    samples = sharded_programs.digits()
    loader: Any = DataLoader(TensorDataset(samples[:, :-1], samples[:, 1:]), 24 // (shape[0] if len(shape) > 1 else 1))
    if loader_first:
        loader = accelerator.prepare(loader)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for x, y in loader:
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def train_whole() -> list[float]:
    set_seed(3)
    model = Writer()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    samples = sharded_programs.digits()
    losses = []
    for x, y in DataLoader(TensorDataset(samples[:, :-1], samples[:, 1:]), 24):
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_loaders_follow_the_mesh_of_a_model(groups: dict[int, Ranks], shape: tuple[int, ...]) -> None:
    expected = groups[1].run(train_whole)[0]
    for losses in groups[2 ** len(shape)].run(train_on_own_mesh, shape, deadline_s=_DEADLINE_S):
        assert losses == pytest.approx(expected, rel=0, abs=1e-6)


def test_a_model_with_parts_comes_before_its_loader(two_ranks: Ranks) -> None:
    with pytest.raises(TrainingError, match="the loaders were prepared before") as raised:
        two_ranks.run(train_on_own_mesh, (2,), True)
    assert "tp_size=2" in raised.value.fix


@pytest.mark.parametrize(("names", "message"), [
    (("data", "parts"), "nobody averages their gradients"),
    (("parts", "data"), "are on the ranks (0, 2|1, 3)"),
], ids=["copies", "distant"])  # fmt: skip
@on_ranks(4)
def test_models_with_parts_that_nobody_averages(names: tuple[str, str], message: str) -> None:
    accelerator = Accelerator(cpu=True)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    model = Writer()
    sharded_programs.cut_into_parts(model, mesh["parts"])
    with pytest.raises(TrainingError, match=message):
        accelerator.prepare(model)


def average_over_joint_dimensions(parallel: dict[str, int]) -> Any:
    """Train as Accelerate's nd_parallel.py does, which averages losses over ``dp_cp``, and by ``reduce``."""
    division = ParallelismConfig(**parallel, cp_size=1)
    accelerator = Accelerator(cpu=True, parallelism_config=division)
    model: Any = torch.nn.Linear(16, 10)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(sharded_programs.digits()[:64, :16] / 16, batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    config = accelerator.parallelism_config
    assert config is not None
    averaged = []
    for x in loader:
        with accelerator.maybe_context_parallel(buffers=[x], buffer_seq_dims=[1], no_restore_buffers={x}):
            group = accelerator.torch_device_mesh["dp_cp"].get_group() if config.dp_cp_dim_names else None
            loss = model(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=group)
        averaged.append((mean.item() / dist.get_world_size(group), accelerator.reduce(loss.detach(), "mean").item()))
    names = config.active_mesh_dims, config.fsdp_dim_names
    accelerator.end_training()
    return averaged, names


@pytest.mark.filterwarnings("ignore:Slicing a flattened dim:UserWarning")
@pytest.mark.parametrize(
    ("ranks", "parallel", "names"),
    [
        (2, {}, ([], [])),
        slow(4, _SHARES_AND_PARTS, (["dp_shard", "tp"], ["dp_shard_cp"])),
        slow(4, _COPIES_AND_SHARES, (["dp_replicate", "dp_shard"], ["dp_replicate", "dp_shard_cp"])),
    ],
)
def test_losses_are_averaged_over_accelerates_names(
    groups: dict[int, Ranks], ranks: int, parallel: dict[str, int], names: tuple[list[str], list[str]]
) -> None:
    for averaged, found in groups[ranks].run(average_over_joint_dimensions, parallel, deadline_s=_DEADLINE_S):
        assert found == names
        assert len(averaged) == 64 // 4 // (ranks // parallel.get("tp_size", 1))
        for by_mesh, by_reduce in averaged:
            assert by_mesh == pytest.approx(by_reduce)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"cp_size": 2}, "no context parallelism"),
    ({"sp_size": 2}, "no sequence parallelism"),
    ({"tp_size": 0}, "tp_size is 0"),
    ({"tp_size": "two"}, "tp_size is 'two'"),
    ({"tp_size": 2, "dp_replicate_size": 2}, "needs dp_shard_size too"),
    ({"tp_size": 2, "tp_handler": object()}, "tp_handler"),
])  # fmt: skip
def test_what_is_not_there(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        ParallelismConfig(**arguments)
    assert raised.value.fix


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"is for 4 ranks \(tp_size=4\), and there is 1|for 4 ranks .* there are 1"):
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=4))
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig())
    assert accelerator.parallelism_config == ParallelismConfig(1, 1, 1)
    assert accelerator.torch_device_mesh is accelerator.state.device_mesh is None
    with pytest.raises(TrainingError, match="have no mesh"):
        _ = accelerator.tensor_parallel_rank


@on_ranks(2)
def test_parts_that_leave_no_ranks_for_shares() -> None:
    with pytest.raises(ConfigError, match="leaves no ranks for that"):
        Accelerator(
            cpu=True,
            fsdp_plugin=FullyShardedDataParallelPlugin(),
            parallelism_config=ParallelismConfig(tp_size=2),
        )

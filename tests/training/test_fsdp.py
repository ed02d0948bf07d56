"""Models that are sharded over the ranks train as whole ones do."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import pathlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as everybody writes it
from safetensors.torch import load_file
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader

from notebook_accel import (
    Accelerator,
    ConfigError,
    DataLoaderConfiguration,
    DistributedType,
    FullyShardedDataParallelPlugin,
    environment,
)
from notebook_accel.errors import CollectiveError, TrainingError
from notebook_accel.local_sgd import LocalSGD
from notebook_accel.training import fsdp
from tests.training import sharded_programs
from tests.training.ranks import Ranks, on_ranks
from tests.training.sharded_programs import Block, Case, Writer

slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def assert_close(ours: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(ours) > 0
    for one, other in zip(ours, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


@pytest.mark.parametrize(("ranks", "at_most"), [(2, 0.55), slow(4, 0.30)])
def test_a_rank_holds_its_share(groups: dict[int, Ranks], ranks: int, at_most: float) -> None:
    group = groups[ranks]
    whole = group.run(sharded_programs.held_bytes, Case(sharded=False))
    sharded = group.run(sharded_programs.held_bytes, Case())
    for of_whole, of_share in zip(whole, sharded, strict=True):
        assert set(of_share) == {"parameters", "gradients", "optimizer"}
        for name, size in of_share.items():
            assert 0 < size <= at_most * of_whole[name], name


@pytest.mark.parametrize("case", [
    Case(calls="model first", groups=True),
    slow(Case(calls="optimizer first", groups=True)),
    slow(Case(plugin={"auto_wrap_policy": "no_wrap", "reshard_after_forward": False})),
    slow(Case(plugin={"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 500})),
    Case(plugin={"transformer_cls_names_to_wrap": ["Block"], "activation_checkpointing": True}),
    Case(plugin={"ignored_modules": r"blocks\.1|norm"}, window=3),
    slow(Case(plugin={"sync_module_states": False})),
    slow(Case(dynamo={"backend": "aot_eager"}, window=2)),
    slow(Case(dynamo={"backend": "aot_eager", "use_regional_compilation": True}, window=2)),
], ids=lambda case: f'{case.calls} {case.plugin} {case.dynamo}')  # fmt: skip
def test_settings_change_no_number(two_ranks: Ranks, case: Case) -> None:
    whole = Case(sharded=False, window=case.window, groups=case.groups)
    expected, weights = two_ranks.run(sharded_programs.trained, whole, 9)[0]
    (losses, sharded), (_, on_rank_1) = two_ranks.run(sharded_programs.trained, case, 9)
    assert losses == pytest.approx(expected, rel=0, abs=1e-6)
    assert sharded.keys() == weights.keys()
    for name, values in sharded.items():
        assert torch.allclose(torch.tensor(values), torch.tensor(weights[name]), atol=1e-5), name
    assert on_rank_1 == {}


class Small(torch.nn.Module):
    """A model with a parameter without dimensions, and with fewer rows than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 1)
        self.last = torch.nn.Linear(1, 2)
        self.temperature = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self.last(self.first(x).tanh()) * self.temperature
        return scaled


def small_parts_trained(sharded: bool, norm_type: float) -> tuple[list[float], list[float]]:
    """Return the norms before clipping, and the weights."""
    torch.manual_seed(3)
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin() if sharded else None)
    model = Small()
    net, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    norms = []
    for rows in torch.randn(4, 2, 3, 4)[:, accelerator.process_index]:
        accelerator.backward(net(rows).square().mean())
        norms.append(float(accelerator.clip_grad_norm_(net.parameters(), 0.1, norm_type)))
        optimizer.step()
        optimizer.zero_grad()
    state = accelerator.get_state_dict(net)
    return norms, [float(value) for tensor in state.values() for value in tensor.flatten()]


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@on_ranks(2)
def test_parts_that_are_smaller_than_the_number_of_ranks(norm_type: float) -> None:
    expected, of_whole = small_parts_trained(False, norm_type)
    norms, weights = small_parts_trained(True, norm_type)
    assert norms == pytest.approx(expected, abs=1e-6)
    assert weights == pytest.approx(of_whole if os.environ["RANK"] == "0" else [], abs=1e-6)


@on_ranks(2)
def test_weights_that_are_written_after_an_evaluation_stay() -> None:
    sharding = FullyShardedDataParallelPlugin(reshard_after_forward=False)
    accelerator = Accelerator(cpu=True, fsdp_plugin=sharding)
    net = accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)))
    with torch.no_grad():
        net(torch.ones(1, 2))
        for parameter in net.parameters():
            parameter.fill_(3.0)
    net(torch.ones(1, 2)).sum().backward()
    written = [float(value.flatten()[0]) for value in accelerator.get_state_dict(net).values()]
    assert written == ([3.0] * 4 if accelerator.is_main_process else [])


def test_bf16_is_as_near_as_whole_models_are(two_ranks: Ranks) -> None:
    exact, whole, sharded = (
        torch.tensor(two_ranks.run(sharded_programs.losses, case, 12)[0])
        for case in (Case(sharded=False), Case(sharded=False, precision="bf16"), Case(precision="bf16"))
    )
    assert not torch.equal(sharded, exact)
    assert (sharded - exact).abs().mean() < 2 * (whole - exact).abs().mean() + 0.01


class Adapted(torch.nn.Module):
    """A frozen bfloat16 layer with a low-rank adapter in float32, as PEFT makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(8, 8).to(torch.bfloat16).requires_grad_(False)
        self.down = torch.nn.Linear(8, 2, bias=False)
        self.up = torch.nn.Linear(2, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x.to(torch.bfloat16)).float() + self.up(self.down(x))


def train_adapter(sharded: bool) -> list[float]:
    torch.manual_seed(2)
    model = torch.nn.Sequential(Adapted(), torch.nn.BatchNorm1d(8), Adapted())
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin() if sharded else None)
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    net, optimizer = accelerator.prepare(model, torch.optim.Adam(learning, lr=0.05))
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(accelerator.process_index))
    losses = []
    for _ in range(6):
        loss = net(x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@on_ranks(2)
def test_adapters_of_a_frozen_model() -> None:
    losses = train_adapter(sharded=True)
    assert losses == pytest.approx(train_adapter(sharded=False), rel=0, abs=1e-5)
    assert losses[-1] < losses[0]


@on_ranks(2)
def test_batch_norms_that_are_units_or_the_model_itself() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", fsdp_plugin=FullyShardedDataParallelPlugin())
    for norms in (torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4)), torch.nn.BatchNorm1d(4)):
        net, optimizer = accelerator.prepare(norms, torch.optim.SGD(norms.parameters(), lr=0.1))
        outputs = net(torch.randn(6, 4))
        accelerator.backward(outputs.square().mean())
        optimizer.step()
        assert {outputs.dtype, *(parameter.grad.dtype for parameter in net.parameters())} == {torch.float32}


@pytest.mark.parametrize("by", ["optimizer", slow("model"), slow("compiled model"), "checkpoint"])
@on_ranks(2)
def test_gradients_that_a_program_drops_are_gone(tmp_path: pathlib.Path, by: str) -> None:
    """A whole model takes a step, and a sharded one that has dropped a micro-batch before."""
    folder, weights = tmp_path / "state", []
    for plugin in (None, FullyShardedDataParallelPlugin()):
        torch.manual_seed(0)
        backend = "eager" if by == "compiled model" else "no"
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, dynamo_backend=backend)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
        net, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        x = torch.full((1, 4), 1.0 + accelerator.process_index)
        accelerator.save_state(folder)
        if plugin is not None:
            with accelerator.no_sync(net):
                accelerator.backward(net(x).square().mean())
            drop = {"optimizer": optimizer.zero_grad, "checkpoint": functools.partial(accelerator.load_state, folder)}
            drop.get(by, net.zero_grad)()
        accelerator.backward(net(x).square().mean())
        optimizer.step()
        weights.append([*accelerator.get_state_dict(net).values()])
        is_main = accelerator.is_main_process
        accelerator.end_training()
    whole, sharded = weights
    if is_main:  # which gets the whole weights
        assert_close(sharded, whole)


@on_ranks(2)
def test_a_step_in_no_sync_averages_shares(tmp_path: pathlib.Path) -> None:
    """Two models have backward passes in ``no_sync`` alone, and two others have passes that average."""
    weights = []
    for is_local in (True, False):
        accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
        torch.manual_seed(0)
        models = [torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)) for _ in range(2)]
        *nets, optimizer = accelerator.prepare(
            *models, torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
        )
        x = torch.full((1, 4), 1.0 + accelerator.process_index)
        with contextlib.ExitStack() as local:
            for net in nets:
                local.enter_context(accelerator.no_sync(net) if is_local else contextlib.nullcontext())
                accelerator.backward(net(x).square().mean())
            accelerator.clip_grad_norm_(nets[0].parameters(), 0.1)
            optimizer.step()
        weights.append([value for net in nets for value in accelerator.get_state_dict(net).values()])
        accelerator.save_state(tmp_path / "state")  # no gradient is left of one rank
        is_main = accelerator.is_main_process
        accelerator.end_training()
    local, averaged = weights
    if is_main:
        assert_close(local, averaged)


@on_ranks(2)
def test_weights_are_saved_in_files_that_others_read(tmp_path: pathlib.Path) -> None:
    """A sharded model is saved in small files, with its weights as they were before it was sharded."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    torch.manual_seed(0)
    model = Writer()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    net = accelerator.prepare(model)
    assert accelerator.unwrap_model(net) is net is model
    accelerator.save_model(net, tmp_path, max_shard_size="20KB")
    state = accelerator.get_state_dict(net)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        assert all(torch.equal(state[name], value) for name, value in before.items())
        assert state["head.weight"] is state["embedding.weight"]
    files = sorted(path.name for path in tmp_path.iterdir())
    assert len(files) > 2
    assert files[-1] == "model.safetensors.index.json"
    saved = {name: value for file in files[:-1] for name, value in load_file(tmp_path / file).items()}
    assert saved.keys() == before.keys() - {"head.weight"}  # it is the embedding's
    for name, value in saved.items():
        assert torch.equal(value, before[name])


@on_ranks(2)
def test_weights_on_rank_0_alone_are_an_error_everywhere() -> None:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    net = accelerator.prepare(torch.nn.Linear(4, 4))
    with pytest.raises(CollectiveError) as raised:
        accelerator.get_state_dict(net) if accelerator.is_main_process else accelerator.wait_for_everyone()
    accelerator.wait_for_everyone()
    assert "rank 0: get_state_dict of a sharded FSDPLinear at " in str(raised.value)
    assert "rank 1: wait for everyone at " in str(raised.value)


@on_ranks(2)
def test_what_can_not_be_is_refused() -> None:
    plugin = FullyShardedDataParallelPlugin()
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2)
    assert accelerator.distributed_type is DistributedType.FSDP
    assert accelerator.is_fsdp2
    assert accelerator.state.fsdp_plugin is not None
    net = accelerator.prepare(torch.nn.Linear(4, 4))
    assert accelerator.prepare(net) is net
    attempts = {
        "LocalSGD can't be used with FSDPLinear": lambda: LocalSGD(accelerator, net, 2),
        "join_uneven_inputs can't be used": lambda: accelerator.join_uneven_inputs([net]),
        "trigger_sync_in_backward can't be used": lambda: accelerator.trigger_sync_in_backward(net),
        "gather takes tensors that each rank has whole": lambda: accelerator.gather(net.weight),
        "reduce takes tensors": lambda: accelerator.reduce(net.weight),
        "cpu_offload needs a GPU": lambda: Accelerator(
            cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(cpu_offload=True)
        ).prepare(torch.nn.Linear(2, 2)),
    }
    with accelerator.accumulate(net):
        accelerator.backward(net(torch.ones(1, 4)).sum())
        for text, attempt in attempts.items():
            with pytest.raises((TrainingError, ConfigError), match=text) as raised:
                attempt()
            assert raised.value.fix
    with pytest.raises(AssertionError, match="FSDP does not support deepcopy"):
        copy.deepcopy(net)


@on_ranks(2)
def test_a_rank_without_a_batch_is_not_waited_for() -> None:
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=FullyShardedDataParallelPlugin(),
        dataloader_config=DataLoaderConfiguration(even_batches=False),
    )
    net, loader = accelerator.prepare(torch.nn.Linear(1, 1), DataLoader(torch.ones(3, 1), batch_size=1))
    said = "1 of the ranks have no batch, and this one would wait in vain for their shares of the model"
    has_more = accelerator.is_main_process
    with torch.no_grad(), pytest.raises(TrainingError, match=said) if has_more else contextlib.nullcontext():
        for x in loader:
            net(x)
    accelerator.wait_for_everyone()


@on_ranks(2)
def test_a_model_that_was_sharded_before_is_taken_as_it_is() -> None:
    """A model that was sharded before prepare trains as a whole one does."""
    trained = []
    for sharded in (True, False):
        torch.manual_seed(0)
        model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        if sharded:
            fully_shard(model[0])
            fully_shard(model)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        net, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        assert not sharded or net is model
        for _ in range(4):
            with accelerator.accumulate(net):
                accelerator.backward(net(torch.full((1, 4), 1.0 + accelerator.process_index)).square().sum())
                optimizer.step()
                optimizer.zero_grad()
        trained.append([*accelerator.get_state_dict(net).values()])
    if accelerator.is_main_process:
        assert_close(*trained)


@on_ranks(2)
def test_a_model_that_was_sharded_before_keeps_its_precision() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")  # joins the group
    policed = fully_shard(torch.nn.Linear(2, 2))
    said = "was sharded before prepare: it computes in the precision of its own policy, not in bf16"
    with pytest.warns(UserWarning, match=said):
        accelerator.prepare(policed)


def prepare_empty_model(seed: int) -> Any:
    """Prepare a model whose weights only rank 0 has, and return rank 0's and how many steps changed the loss."""
    torch.manual_seed(seed)
    accelerator = Accelerator(
        cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True, ignored_modules="norm")
    )
    with torch.device("cpu" if accelerator.is_main_process else "meta"):
        model = Writer()
    before = {name: value.tolist() for name, value in model.state_dict().items() if not value.is_meta}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    net, optimizer = accelerator.prepare(model, optimizer)
    after = {name: value.tolist() for name, value in accelerator.get_state_dict(net).items()}
    assert before == after
    assert net.head.weight is net.embedding.weight
    assert all(bool((block.mask == torch.tril(torch.ones(16, 16))).all()) for block in net.blocks)
    x = sharded_programs.digits()[:4]
    losses = []
    for _ in range(3):
        loss = F.cross_entropy(net(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    os.environ.pop("FSDP_CPU_RAM_EFFICIENT_LOADING", None)
    return losses


def test_weights_that_only_rank_0_has(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(prepare_empty_model, 4)
    assert first == second
    assert first[2] < first[1] < first[0]


@on_ranks(2)
def test_weights_that_no_rank_has() -> None:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    with pytest.raises(TrainingError, match="has no weights on rank 0") as raised:
        accelerator.prepare(torch.nn.Linear(2, 2, device="meta"))
    assert "load the weights on rank 0" in (raised.value.fix or "")


def test_one_rank_shards_nothing() -> None:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    model = torch.nn.Linear(2, 2)
    assert accelerator.prepare(model) is model
    assert accelerator.distributed_type is DistributedType.NO
    assert not accelerator.is_fsdp2
    assert not fsdp.is_sharded(model)


# Settings


def units(**settings: Any) -> list[str]:
    model = Writer(depth=2)
    names = {module: name for name, module in model.named_modules()}
    return [names[unit] for unit in fsdp.chosen_units(model, FullyShardedDataParallelPlugin(**settings))]


def test_parts_that_are_gathered_one_at_a_time() -> None:
    blocks = ["blocks.1", "blocks.0"]
    assert units() == units(auto_wrap_policy="TRANSFORMER_BASED_WRAP") == blocks
    assert units(transformer_cls_names_to_wrap="Block") == blocks
    assert units(transformer_cls_names_to_wrap=["LayerNorm"]) == ["norm", "blocks.1.norm", "blocks.0.norm"]
    assert units(auto_wrap_policy="no_wrap") == []
    assert units(auto_wrap_policy=ModuleWrapPolicy({Block})) == blocks
    assert units(auto_wrap_policy=lambda module, **_: isinstance(module, Block)) == blocks
    assert units(auto_wrap_policy="size_based_wrap", min_num_params=1000) == [
        "blocks.1.down", "blocks.1.up", "blocks.0.down", "blocks.0.up",
    ]  # fmt: skip
    # The embedding's weight is the head's too: the whole model gathers it.
    assert units(transformer_cls_names_to_wrap=["Embedding"]) == ["positions"]
    with pytest.raises(ConfigError, match="no module of the class Nothing") as raised:
        units(transformer_cls_names_to_wrap=["Nothing"])
    assert "Block" in (raised.value.fix or "")


def test_repeated_parts_of_a_sequential_are_gathered_one_at_a_time() -> None:
    def units_of(model: torch.nn.Module) -> list[str]:
        names = {module: name for name, module in model.named_modules()}
        return [names[unit] for unit in fsdp.chosen_units(model, FullyShardedDataParallelPlugin())]

    nn = torch.nn
    layers = [nn.Embedding(9, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.LayerNorm(4)]
    assert units_of(nn.Sequential(*layers)) == ["4", "2"]
    assert units_of(nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), nn.ReLU())) == [
        "1.1", "1.0",
    ]  # fmt: skip
    assert units_of(nn.Sequential(nn.Linear(4, 4), nn.ReLU())) == []


def test_settings_of_the_launch() -> None:
    variables = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_RESHARD_AFTER_FORWARD": "false",
        "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP",
        "FSDP_MIN_NUM_PARAMS": "77",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "A,B",
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
        "FSDP_ACTIVATION_CHECKPOINTING": "yes",
    }
    with environment.patched(dict(variables)):
        plugin = Accelerator(cpu=True).state.fsdp_plugin
        given = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(min_num_params=5)).state.fsdp_plugin
    assert plugin is not None
    assert (plugin.reshard_after_forward, plugin.auto_wrap_policy, plugin.min_num_params) == (
        False,
        "SIZE_BASED_WRAP",
        77,
    )
    assert (plugin.transformer_cls_names_to_wrap, plugin.saves_whole) == (["A", "B"], True)
    assert plugin.activation_checkpointing is True
    assert given is not None
    assert given.min_num_params == 5
    assert Accelerator(cpu=True).state.fsdp_plugin is None
    for name, text in (("FSDP_VERSION", "3"), ("FSDP_OFFLOAD_PARAMS", "perhaps"), ("FSDP_MIN_NUM_PARAMS", "1e6")):
        with environment.patched({name: text}), pytest.raises(ConfigError, match=text):
            FullyShardedDataParallelPlugin()


@pytest.mark.parametrize(("asked", "reshards"), [
    ({"sharding_strategy": "FULL_SHARD"}, True),
    ({"sharding_strategy": "SHARD_GRAD_OP"}, False),
    ({"reshard_after_forward": "true"}, True),
    ({"reshard_after_forward": False}, False),
    ({}, True),
])  # fmt: skip
def test_strategies_by_their_names_in_fsdp_1(asked: dict[str, Any], reshards: bool) -> None:
    assert FullyShardedDataParallelPlugin(**asked).reshard_after_forward is reshards


@pytest.mark.parametrize(("settings", "text"), [
    ({"sharding_strategy": "NO_SHARD"}, "strategy 'NO_SHARD' isn't supported"),
    ({"auto_wrap_policy": "some"}, "auto_wrap_policy is 'some'"),
    ({"auto_wrap_policy": 3}, "auto_wrap_policy is 3"),
    ({"state_dict_type": "local_state_dict"}, "state_dict_type is 'local_state_dict'"),
    ({"activation_checkpointing_offload": True}, "activation_checkpointing_offload isn't supported"),
    ({"mixed_precision_policy": "bf17"}, "mixed_precision_policy is 'bf17'"),
    ({"mixed_precision_policy": {"buffer_dtype": torch.bfloat16}}, "mixed_precision_policy is"),
])  # fmt: skip
def test_settings_that_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as raised:
        FullyShardedDataParallelPlugin(**settings)
    assert raised.value.fix
    with pytest.raises(ConfigError, match="fsdp_plugin is 'yes'"):
        Accelerator(cpu=True, fsdp_plugin="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [
    {"fsdp_version": 1}, {"use_orig_params": False}, {"forward_prefetch": True}, {"backward_prefetch": "BACKWARD_PRE"},
    {"limit_all_gathers": False},
])  # fmt: skip
def test_settings_without_an_effect_are_named(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.warns(UserWarning, match=name):
        FullyShardedDataParallelPlugin(**settings)


def test_precision_policies() -> None:
    plugin = FullyShardedDataParallelPlugin
    assert plugin().precision_policy(None) == MixedPrecisionPolicy()
    assert plugin().precision_policy(torch.bfloat16) == MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    bf16 = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    for given in ("bf16", {"param_dtype": "bf16", "reduce_dtype": torch.bfloat16}, bf16):
        assert plugin(mixed_precision_policy=given).precision_policy(None) == bf16

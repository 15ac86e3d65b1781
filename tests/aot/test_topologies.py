"""The pure parts: names of topologies, text of compiled programs, and the roofline."""

import pytest

from noria.aot.hlo import Exchange, exchanges
from noria.aot.models import bundled, load_config
from noria.aot.roofline import bytes_sent, roofline
from noria.aot.topologies import CHIPS, parse_topology
from noria.errors import ConfigError, WeightsError
from noria.models.registry import build_model
from noria.nn.param import num_parameters
from noria.runner.work import Work

PARAMETERS = {  # in billions, as their makers say
    "llama-3.2-1b": 1.24,
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.6,
    "qwen3-0.6b": 0.6,
    "qwen3-4b": 4.0,
    "qwen3-8b": 8.2,
    "qwen3-32b": 32.8,
    "qwen2.5-7b": 7.6,
    "qwen2.5-32b": 32.8,
    "qwen3-30b-a3b": 30.5,
    "mixtral-8x7b": 46.7,
    "deepseek-v3": 671.0,
    "gemma-3-27b-text": 27.0,
}


def test_topology() -> None:
    topology = parse_topology("v6e:2x4")
    assert (topology.name, topology.num_chips, topology.num_devices) == ("v6e:2x4", 8, 8)
    assert topology.chip.device.memory == int(31.25 * 2**30)
    halves = parse_topology("tpu7x:2x2x1")  # a chip is two devices
    assert (halves.num_chips, halves.num_devices) == (4, 8)
    assert halves.chip.device.flops == 2307e12 / 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v6:2x4", "the chip v6 is not known; known: v5e, v5p, v6e, tpu7x; did you mean v6e"),
        ("h100", "the chip h100 is not known"),
        ("v6e", "a grid of v6e has 2 sizes, as in v6e:2x2"),
        ("v6e:2x2x1", "a grid of v6e has 2 sizes"),
        ("v5p:2x2", "a grid of v5p has 3 sizes, as in v5p:2x2x4"),
        ("v6e:0x4", "a grid of v6e has 2 sizes"),
        ("v6e:2x-4", "a grid of v6e has 2 sizes"),
    ],
)
def test_bad_topologies(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_topology(text)


@pytest.mark.parametrize("name", bundled())
def test_bundled_configs_have_the_parameters_that_their_makers_name(name: str) -> None:
    count = num_parameters(build_model(load_config(name)).declaration())
    assert count / 1e9 == pytest.approx(PARAMETERS[name], rel=0.02)


def test_configs_that_are_none(tmp_path) -> None:
    with pytest.raises(WeightsError, match=r"nope is neither a folder .* nor one of deepseek-v3, gemma-3-27b-text, "):
        load_config("nope")
    (tmp_path / "config.json").write_text("[1")
    with pytest.raises(WeightsError, match="is not JSON"):
        load_config(str(tmp_path))
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(WeightsError, match="must hold a JSON object"):
        load_config(str(tmp_path / "config.json"))
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{\x80")
    with pytest.raises(WeightsError, match="is not JSON"):
        load_config(str(tmp_path / "config.json"))
    (tmp_path / "model.gguf").write_bytes(b"GGUF\xff")
    with pytest.raises(WeightsError, match=r"model.gguf.* is truncated"):
        load_config(str(tmp_path / "model.gguf"))


HLO = """HloModule jit_forward, entry_computation_layout={(bf16[8,4]{1,0})->bf16[8,4]{1,0}}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  ROOT %sum = f32[] add(%x, %y)
}

%body.3 (state: (s32[], f32[16,128])) -> (s32[], f32[16,128]) {
  %state = (s32[], f32[16,128]) parameter(0)
  %all-reduce.1 = f32[16,128]{1,0} all-reduce(%part), channel_id=1, replica_groups={{0,1}}, to_apply=%add
  %fusion = f32[16,128]{1,0} fusion(%all-reduce.1), kind=kLoop, calls=%inside
  ROOT %pair = (s32[], f32[16,128]) tuple(%next, %fusion)
}

%inside (p: f32[16,128]) -> f32[16,128] {
  ROOT %gathered = (bf16[16,64]{1,0}, bf16[16,128]{1,0}) all-gather-start(%half), dimensions={1}
}

%condition (state: (s32[], f32[16,128])) -> pred[] {
  ROOT %less = pred[] compare(%index, %limit), direction=LT
}

ENTRY %main.9 (tokens: s32[16]) -> f32[16,128] {
  %loop = (s32[], f32[16,128]) while(%start), condition=%condition, body=%body.3, \
backend_config={"known_trip_count":{"n":"32"}}
  ROOT %both = (f32[16]{0}, s32[16]{0}) all-gather(%a, %b), dimensions={0}
}
"""


def test_exchanges_are_counted_as_often_as_their_loops_turn() -> None:
    assert exchanges(HLO) == [
        Exchange("all-reduce", 16 * 128 * 4, 32, 2),
        Exchange("all-gather", 16 * 128 * 2, 32),
        Exchange("all-gather", 16 * 4 + 16 * 4, 1),
    ]
    assert exchanges("") == []


def test_the_turns_of_a_loop_may_stand_in_its_condition() -> None:
    """As in texts for TPUs. A limit that is no constant is not known, so the loop counts once."""
    silent = HLO.replace('backend_config={"known_trip_count":{"n":"32"}}', "metadata={}")
    assert [each.times for each in exchanges(silent)] == [1, 1, 1]
    limit = "  %limit = s32[]{:T(128)} constant(7)\n  ROOT %less"
    assert [each.times for each in exchanges(silent.replace("  ROOT %less", limit))] == [7, 7, 1]


@pytest.mark.parametrize(
    ("groups", "devices"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", 4),
        ("{{0}}", 1),
        ("[4,2]<=[8]", 2),
        ("[2,4]<=[4,2]T(1,0)", 4),
        ("mesh['axis_0'=2,'axis_1'=1,'axis_2'=4] {'axis_0'}", 2),
        ("mesh['axis_0'=2,'axis_1'=1,'axis_2'=4] {'axis_0','axis_2'}", 8),
        ("mesh['axis_0'=2,'axis_1'=8] {'axis_0','axis_1':(2)4}", 8),
        ("{}", None),
    ],
)
def test_how_many_devices_take_part(groups: str, devices: int | None) -> None:
    text = HLO.replace("replica_groups={{0,1}}", f"replica_groups={groups}")
    assert [each.devices for each in exchanges(text)] == [devices, None, None]


def test_bytes_sent_by_rings() -> None:
    assert bytes_sent([Exchange("all-reduce", 800, 2)], 4) == 2 * 2 * 800 * 3 / 4
    assert bytes_sent([Exchange("all-gather", 800, 1)], 4) == 600
    assert bytes_sent([Exchange("reduce-scatter", 200, 1)], 4) == 600
    assert bytes_sent([], 1) == 0
    # Those of a part of the devices.
    assert bytes_sent([Exchange("all-reduce", 800, 2, 2), Exchange("all-gather", 800, 1)], 4) == 2 * 2 * 400 + 600
    assert bytes_sent([Exchange("reduce-scatter", 200, 1, 2)], 4) == 200


def test_the_slower_of_arithmetic_and_memory_counts() -> None:
    device = CHIPS["v6e"].device
    memory = roofline(device, Work(bytes_read=1638e9, flops=1e12))
    assert (memory.bound, memory.seconds) == ("memory", pytest.approx(1.0))
    compute = roofline(device, Work(bytes_read=1e9, flops=2 * 918e12), exchanged=400e9)
    assert (compute.bound, compute.seconds) == ("compute", pytest.approx(3.0))

"""What a plan expects of Llama 3.1 8B, against arithmetic by hand."""

from __future__ import annotations

import pytest
from jax.sharding import AbstractMesh

from noria.aot.estimate import Estimator
from noria.aot.models import load_config
from noria.aot.programs import ProgramFigures
from noria.aot.topologies import CHIPS
from noria.batch.buckets import Buckets
from noria.config import EngineConfig, ModelLimits
from noria.models.decoder import Decoder
from noria.models.registry import build_model
from noria.nn.param import abstract_params
from noria.parallel.mesh import AXES
from noria.parallel.rules import on_one_device
from noria.runner.work import WorkModel

V6E = CHIPS["v6e"].device
PARAMETERS = 8.03e9
TABLE = 128256 * 4096  # parameters of embedding and of head, each
KV_BYTES = 2 * 8 * 128 * 2 * 32  # of a token in all layers: keys and values of 8 heads in bfloat16


def estimator(sent: float = 0.0, context: int = 1000, most_model_len: int | None = None) -> Estimator:
    """With most_model_len the long shape has 8 rows."""
    decoder = build_model(load_config("llama-3.1-8b"))
    sizes = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "max_model_len": 4096}
    config = EngineConfig(model="m", most_model_len=most_model_len, **sizes)
    resolved = config.resolve(ModelLimits(131072, 128256), "tpu")
    buckets = Buckets.of(resolved)
    programs = [ProgramFigures(name="forward", bucket=size, seconds=1.0, sent=sent) for size in buckets.tokens]
    if most_model_len is not None:
        programs += [ProgramFigures(name="forward long", bucket=size, seconds=1.0) for size in buckets.tokens]
    programs += [ProgramFigures(name="sample", bucket=size, seconds=1.0) for size in buckets.requests]
    work = WorkModel(decoder.config, abstract_params(decoder.declaration(), "bfloat16"), KV_BYTES / 32)
    return Estimator(V6E, resolved, buckets, work, context, programs, 8 if most_model_len else 0)


def divided(sent: float = 0.0) -> Estimator:
    """As estimator, with attention data 2 x tensor 4: each device has two KV heads, and an eighth of the rest."""
    config = EngineConfig(
        model="m",
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_model_len=4096,
        attention_data_parallel_size=2,
        tensor_parallel_size=4,
    ).resolve(ModelLimits(131072, 128256), "tpu")
    buckets = Buckets.of(config)
    programs = [ProgramFigures(name="forward", bucket=2 * n, seconds=1.0, sent=sent) for n in buckets.tokens]
    programs += [ProgramFigures(name="sample", bucket=2 * n, seconds=1.0) for n in buckets.requests]
    one = on_one_device(build_model(load_config("llama-3.1-8b")).config, AbstractMesh((1, 2, 1, 4), AXES))
    work = WorkModel(one, abstract_params(Decoder(one).declaration(), "bfloat16"), KV_BYTES / 32 / 4, 2)
    return Estimator(V6E, config, buckets, work, 1000, programs)


def test_attention_that_is_divided_by_request() -> None:
    """Attention is a quarter for half of the requests, everything else an eighth for all of them."""
    some = divided()
    decode, prefill = some.decode(64), some.prefill(2048)
    assert decode is not None
    assert prefill is not None
    assert (decode.rows, decode.tokens, prefill.tokens) == (64, 64, 2048)
    attention = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
    others = PARAMETERS - 2 * TABLE - attention
    by_hand = (attention * 2 / 4 + (others + TABLE) * 2 / 8 + 32 * 1001 * KV_BYTES / 4) / 1638e9
    assert decode.seconds == pytest.approx(by_hand, rel=0.02)
    pairs = 1024 * 1025 / 2  # of the prompt of a rank
    products = 2 * (attention / 4 * 1024 + others / 8 * 2048) + 4 * 32 * 128 * 32 * pairs / 4
    assert prefill.seconds == pytest.approx(products / 918e12 + TABLE * 2 / 8 / 1638e9, rel=0.02)
    forward, sample = some.of_program(some.programs[0]), some.of_program(some.programs[-1])
    assert forward is not None
    assert forward.bound == "memory"
    assert sample is not None
    assert sample.memory == pytest.approx(TABLE * 2 / 8 / 1638e9)
    slower = divided(sent=40e6).decode(64)
    assert slower is not None
    assert slower.seconds - decode.seconds == pytest.approx(40e6 / 400e9)


def test_decode_reads_weights_and_cache() -> None:
    speed = estimator().decode(64)
    assert speed is not None
    by_hand = ((PARAMETERS - TABLE) * 2 + 64 * 1001 * KV_BYTES) / 1638e9  # of the embedding only a few rows are read
    assert speed.seconds == pytest.approx(by_hand, rel=0.02)
    assert speed.tokens_per_s == pytest.approx(64 / by_hand, rel=0.02)


def test_prefill_multiplies() -> None:
    speed = estimator().prefill(2048)
    assert speed is not None
    attention = 4 * 32 * 128 * 32 * 2048 * 2049 / 2  # two products a pair of query and visible key, in 32 layers
    by_hand = (2 * (PARAMETERS - 2 * TABLE) * 2048 + attention) / 918e12 + TABLE * 2 / 1638e9  # and one row's head
    assert speed.seconds == pytest.approx(by_hand, rel=0.02)


def test_long_requests_read_the_weights_once_a_pass() -> None:
    one, short, long = estimator(), estimator(most_model_len=1001), estimator(most_model_len=1000)
    assert short.decode(64) == one.decode(64)
    assert long.decode(8) == one.decode(8)
    divided, whole = long.decode(20), one.decode(20)
    assert divided is not None
    assert whole is not None
    weights = (PARAMETERS - 2 * TABLE) * 2 / 1638e9
    assert divided.seconds - whole.seconds == pytest.approx(2 * weights, rel=0.02)
    prompts = short.prefill(2048)
    assert prompts is not None
    assert prompts.tokens == 2048


def test_a_program_of_long_requests_has_their_roofline() -> None:
    some = estimator(most_model_len=512)
    by_key = {(each.name, each.bucket): some.of_program(each) for each in some.programs}
    lines = [by_key[key] for key in (("forward", 64), ("forward long", 64), ("forward long", 2048))]
    assert [line is not None and line.bound for line in lines] == ["memory", "memory", "compute"]
    usual, longer = estimator(most_model_len=512, context=300), estimator(most_model_len=512, context=2000)
    of = lambda some, name: some.of_program(ProgramFigures(name=name, bucket=8 if "long" in name else 16, seconds=1.0))
    assert of(usual, "forward").memory < of(longer, "forward").memory  # of 300 and of 511 tokens
    assert of(usual, "forward long").memory < of(longer, "forward long").memory  # of 512 and of 2000


def test_what_is_sent_comes_on_top() -> None:
    alone, together = estimator().decode(64), estimator(sent=40e6).decode(64)
    assert alone is not None
    assert together is not None
    assert together.seconds - alone.seconds == pytest.approx(40e6 / 400e9)


def test_programs_have_the_roofline_of_a_full_bucket() -> None:
    some = estimator()
    by_key = {(each.name, each.bucket): some.of_program(each) for each in some.programs}
    assert by_key["forward", 64].bound == "memory"
    assert by_key["forward", 2048].bound == "compute"
    assert by_key["sample", 64].memory == pytest.approx(TABLE * 2 / 1638e9)
    assert some.of_program(ProgramFigures(name="tables", bucket=None, seconds=1.0)) is None
    assert some.of_program(ProgramFigures(name="forward", bucket=64, seconds=1.0, error="no")) is None


def test_no_speed_without_its_programs() -> None:
    some = estimator()
    broken = [ProgramFigures(name=each.name, bucket=each.bucket, seconds=1.0, error="no") for each in some.programs]
    assert Estimator(V6E, some.config, some.buckets, some.work, 0, broken).decode(64) is None

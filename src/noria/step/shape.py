"""What some requests want of the sampler beyond a choice: logits changed token by token.

How often which token was generated, and biases for every token, are kept on the device, a row for each row of the
batch: `edit` writes a row when a request takes it, and the step that samples a token counts it. So the newest token,
which the host may not know yet, is in.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax, tree_util

from noria.batch.edits import BIAS, HEADER, MAX_ENTRIES, OUTPUT, PROMPT
from noria.batch.inputs import SampleInputs, ShapingInputs
from noria.ops.sampling.xla import ban
from noria.step.sample import stop_columns
from noria.step.verify import count_drafts


@tree_util.register_dataclass
@dataclass(frozen=True)
class Tables:
    """Rows of the batch by tokens; a row means something while a request with penalties or biases has it. Where there
    are several ranks they have one more axis in front."""

    counts: jax.Array  # [M, V] int32: twice the number of times it was generated; odd where it is in the prompt, too
    bias: jax.Array  # [M, V] float32: what is added to its logit; -inf bans it

    @staticmethod
    def abstract(rows: int, vocab: int, ranks: int = 1) -> Tables:
        """rows: of each rank."""
        shape = (rows, vocab) if ranks == 1 else (ranks, rows, vocab)
        counts, bias = (jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.float32))
        return Tables(counts, bias)  # pyright: ignore[reportArgumentType]


def edit(tables: Tables, packed: jax.Array) -> Tables:
    """packed: int32, see batch/edits.py."""
    row, is_first = packed[0], packed[1] == 1
    tokens, kinds, values = packed[HEADER:].reshape(3, MAX_ENTRIES)
    index = row if tables.counts.ndim == 2 else jnp.divmod(row, tables.counts.shape[1])
    counts, bias = tables.counts[index], tables.bias[index]
    vocab = counts.shape[0]
    of_kind = lambda kind: jnp.where(kinds == kind, tokens, vocab)  # out of range: dropped
    to_float = lambda bits: lax.bitcast_convert_type(bits, jnp.float32)
    counts = jnp.where(is_first, 0, counts).at[of_kind(PROMPT)].max(1, mode="drop")
    counts = counts.at[of_kind(OUTPUT)].add(2 * values, mode="drop")
    bias = jnp.where(is_first, to_float(packed[2]), bias).at[of_kind(BIAS)].set(to_float(values), mode="drop")
    return Tables(tables.counts.at[index].set(counts), tables.bias.at[index].set(bias))


def _rows(table: jax.Array, rows: jax.Array) -> jax.Array:
    """rows [R], of each rank those of its own part -> [R, V]."""
    if table.ndim == 2:
        return table[rows]
    own = jax.vmap(lambda part, rows: part[rows])(table, rows.reshape(table.shape[0], -1))
    return own.reshape(rows.shape[0], -1)


def apply_mask(logits: jax.Array, mask: jax.Array) -> jax.Array:
    """logits [R, V]; mask int32 [R, ceil(V / 32)], see GrammarMasks, all ones for a row without a grammar."""

    def masked(logits: jax.Array) -> jax.Array:
        bits = (mask[:, :, None] >> jnp.arange(32)) & 1  # [R, W, 32]
        allowed = bits.reshape(mask.shape[0], -1)[:, : logits.shape[1]]
        return jnp.where(allowed == 1, logits, -jnp.inf)

    return lax.cond(jnp.any(mask != -1), masked, lambda x: x, logits)


def mask_width(vocab: int) -> int:
    """Words of a row of a mask."""
    return -(-vocab // 32)


def count(tables: Tables, shaping: ShapingInputs, token_ids: jax.Array) -> Tables:
    """Takes the sampled tokens [R] in, of rows whose tokens count."""
    rows = jnp.where((shaping.counts == 1) & (token_ids >= 0), shaping.table_row, tables.counts.shape[-2])
    add = lambda part, rows, token_ids: part.at[rows, token_ids].add(2, mode="drop")
    if tables.counts.ndim == 2:
        return Tables(add(tables.counts, rows, token_ids), tables.bias)
    ranks = tables.counts.shape[0]
    return Tables(jax.vmap(add)(tables.counts, rows.reshape(ranks, -1), token_ids.reshape(ranks, -1)), tables.bias)


def shape(
    logits: jax.Array, inputs: SampleInputs, shaping: ShapingInputs, tables: Tables, sampled: jax.Array
) -> jax.Array:
    """logits [R, V] with padding masked -> the same with biases, bans and penalties applied, in vLLM's order.

    sampled: tokens of the step before, see StepPrograms.forward. What a row does not ask for leaves its logits as they
    are, to the last bit.
    """
    vocab = logits.shape[1]

    def add_bias(logits: jax.Array) -> jax.Array:
        return logits + jnp.where(shaping.has_bias[:, None] == 1, _rows(tables.bias, shaping.table_row), 0)

    logits = lax.cond(jnp.any(shaping.has_bias == 1), add_bias, lambda x: x, logits)
    columns = jnp.concatenate([stop_columns(inputs, vocab), bad_columns(shaping, sampled, vocab)], axis=1)
    logits = ban(logits, columns)
    is_penalized = (shaping.presence != 0) | (shaping.frequency != 0) | (shaping.repetition != 1)

    def penalized(logits: jax.Array) -> jax.Array:
        return penalize(logits, count_drafts(_rows(tables.counts, shaping.table_row), inputs), shaping)

    return lax.cond(jnp.any(is_penalized), penalized, lambda x: x, logits)


def bad_columns(shaping: ShapingInputs, sampled: jax.Array, vocab: int) -> jax.Array:
    """[R, MAX_BAD] for `ban`: the tokens that would complete a bad sequence; V where the beginning is not there."""
    newest = jnp.where(shaping.newest >= 0, sampled[jnp.maximum(shaping.newest, 0)], shaping.tail[:, -1])
    tail = shaping.tail.at[:, -1].set(newest)
    beginnings, last = shaping.bad[..., :-1], shaping.bad[..., -1]
    is_begun = jnp.all((beginnings < 0) | (beginnings == tail[:, None]), axis=-1)
    return jnp.where(is_begun & (last >= 0), last, vocab)


def penalize(logits: jax.Array, counts: jax.Array, shaping: ShapingInputs) -> jax.Array:
    """logits, counts [R, V], see Tables. Repetition (Keskar et al. 2019), then OpenAI's frequency and presence."""
    repetition = jnp.where(counts > 0, shaping.repetition[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
    times = counts >> 1
    frequency = shaping.frequency[:, None] * times.astype(jnp.float32)
    presence = jnp.where(times > 0, shaping.presence[:, None], 0.0)
    # Products apart from differences: fused into one instruction here and not there, they would round differently.
    logits, frequency = lax.optimization_barrier((logits, frequency))
    return logits - frequency - presence

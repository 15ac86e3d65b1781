"""How byte-level BPE vocabularies cut a text into words, by the names GGUF files use (`tokenizer.ggml.pre`).

The regular expressions are those of the models' own tokenizer.json files; which name means which is llama.cpp's list
(llama-vocab.cpp). Each pattern in turn cuts the pieces that the pattern before it left.
"""

from __future__ import annotations

from dataclasses import dataclass

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BREAKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"


def _llama3(digits: str) -> str:
    return rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BREAKS}"


def _cased(suffix: str, digits: str) -> str:
    """Words that also end where a capital follows a small letter (tekken, o200k)."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = f"{lead}{_UPPER}*{_LOWER}+{suffix}|{lead}{_UPPER}+{_LOWER}*{suffix}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BREAKS}"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """patterns: in order. ignore_merges: a word that is a token is taken whole. add_bos: when a file does not say."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


def find_pre_tokenizer(name: str) -> PreTokenizer | None:
    """The pre-tokenizer of a GGUF name, or None when it is unknown."""
    for names, pre_tokenizer in _table():
        if name in names:
            return pre_tokenizer
    return None


def pre_tokenizer_names() -> list[str]:
    """Every known name, sorted."""
    return sorted(name for names, _ in _table() for name in names)


def _table() -> tuple[tuple[tuple[str, ...], PreTokenizer], ...]:
    digit, three_digits = r"\p{N}", r"\p{N}{1,3}"
    return (
        # files older than the key: what llama.cpp falls back to, whatever the model
        (("default",), PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))),
        (
            ("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "modern-bert", "granite-docling"),
            PreTokenizer((_GPT2,)),
        ),
        (
            ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
            PreTokenizer((digit, _GPT2)),
        ),
        (
            ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"),
            PreTokenizer((_llama3(three_digits),), ignore_merges=True, add_bos=True),
        ),
        (("dbrx", "smaug-bpe", "chatglm-bpe"), PreTokenizer((_llama3(three_digits),))),
        (("glm4",), PreTokenizer((_llama3(three_digits),), ignore_merges=True)),
        (
            ("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"),
            PreTokenizer((_llama3(digit),)),
        ),
        (("tekken",), PreTokenizer((_cased("", digit),), ignore_merges=True, add_bos=True)),
        (("gpt-4o", "llama4"), PreTokenizer((_cased(f"{_CONTRACTION}?", three_digits),))),
        (("deepseek-llm",), PreTokenizer(_deepseek_llm())),
        (("deepseek-coder",), PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, digit))),
        (("deepseek-v3", "hunyuan-dense"), PreTokenizer(_deepseek_v3())),
        (("falcon",), PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"))),
    )


def _deepseek_v3() -> tuple[str, ...]:
    ascii_word = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    words = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    return r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", f"{ascii_word}|{words}|{_BREAKS}"


def _deepseek_llm() -> tuple[str, ...]:
    # The letters with upper and lower case: neither \p{L} nor \p{Lu} with \p{Ll} means the same.
    letters = (
        "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
        "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
        "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
        "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
        "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
        "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
        "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
        "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
        "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
        "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
    )
    marks = "!-/:-~！-／：-～‘-‟\u3000-。"
    return r"[\r\n]", rf"\s?[{letters}]+", rf"\s?[{marks}]+", r"\s+$", _CJK, r"\p{N}+"

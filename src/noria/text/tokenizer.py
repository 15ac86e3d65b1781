"""Tokenizers: one class for every kind of vocabulary, and the loader that chooses how to build it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from noria.errors import ConfigError, RequestError, WeightsError
from noria.text.chat import ChatTemplate

# Tokens that end a turn or a text by the convention of their model families; a vocabulary that declares a single
# end-of-sequence token often has one of these besides. Only those that are control tokens of the vocabulary count.
END_TOKENS = (
    "<|im_end|>",  # ChatML: Qwen, SmolLM
    "<|endoftext|>",  # GPT-2, Qwen, SmolLM
    "<|eot_id|>",  # Llama 3
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|eot|>",  # Llama 4
    "<|eom|>",
    "<end_of_turn>",  # Gemma
    "<eos>",
    "<turn|>",
    "<|end|>",  # Phi
    "<｜end▁of▁sentence｜>",  # DeepSeek
    "</s>",  # Llama 2, Mistral
)


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """What a loader found out about a tokenizer.

    encode_text: text -> ids, special tokens in the text parsed as such and none added.
    pieces: for each id its bytes as they appear in the middle of a text.
    prefix, suffix: the ids added around a text.
    num_leading_spaces: spaces that encoding puts before a text, to be removed when a whole text is decoded.
    chat_templates: by name; the usual one is "default".
    special_tokens: what a chat template may name, such as bos_token -> "<s>".
    """

    encode_text: Callable[[str], list[int]]
    pieces: Sequence[bytes]
    special_ids: frozenset[int]
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    num_leading_spaces: int = 0
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    special_tokens: Mapping[str, str] = field(default_factory=dict)


class Tokenizer:
    """Text to token ids and back. Loading is `load_tokenizer`; instances are safe to share between threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._pieces = vocabulary.pieces
        self._templates: dict[str, ChatTemplate] = {}  # compiled on first use
        self.vocab_size = len(vocabulary.pieces)  # added tokens included, padding at the end of the vocabulary not
        self.bos_token_id = vocabulary.bos_token_id
        self.eos_token_ids = vocabulary.eos_token_ids  # every id that ends a text or a turn
        self.special_ids = vocabulary.special_ids

    @property
    def chat_template(self) -> str | None:
        """The source of the model's usual chat template."""
        return self.template_source()

    def template_source(self, name: str = "default") -> str | None:
        """The source of the chat template of that name; None when the model has none."""
        return self._vocabulary.chat_templates.get(name)

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Texts of special tokens by the names chat templates use, such as bos_token."""
        return self._vocabulary.special_tokens

    def compiled_template(self, name: str = "default") -> ChatTemplate | None:
        """The chat template of that name, ready to render; None when the model has none. Raises RequestError."""
        source = self._vocabulary.chat_templates.get(name)
        if source is not None and name not in self._templates:
            self._templates[name] = ChatTemplate(source)
        return self._templates.get(name)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written in it are parsed as such.

        add_special_tokens: put the model's beginning and end of sequence around it, where it wants them. Off for a
        rendered chat template, which writes them itself. Raises RequestError for what is no text.
        """
        if not isinstance(text, str):
            raise RequestError(f"a prompt must be a string, not {type(text).__name__}; pass token ids as a list")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt has a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}, "
                "which is no text; remove it"
            ) from None
        ids = self._vocabulary.encode_text(text)
        return [*self._vocabulary.prefix, *ids, *self._vocabulary.suffix] if add_special_tokens else ids

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True, continuation: bool = False) -> str:
        """The text of `token_ids`; bytes that are not UTF-8 become U+FFFD, ids outside the vocabulary nothing.

        continuation: the ids continue a text, so that the space which some tokenizers put before every text is one
        of its own and stays.
        """
        skipped = self.special_ids if skip_special_tokens else frozenset()
        text = b"".join(self.token_bytes(i) for i in token_ids if i not in skipped).decode("utf-8", errors="replace")
        if not continuation:
            spaces = len(text) - len(text.lstrip(" "))
            text = text[min(spaces, self._vocabulary.num_leading_spaces) :]
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token in the middle of a text: b"" for an id outside the vocabulary, such as its padding."""
        return self._pieces[token_id] if 0 <= token_id < self.vocab_size else b""

    def has_same_tokens(self, other: Tokenizer) -> bool:
        """Whether every token id means the same to both."""
        return self.special_ids == other.special_ids and list(self._pieces) == list(other._pieces)


def load_tokenizer(path: Path, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer of a model: a folder with tokenizer.json, that file itself, or a .gguf file.

    chat_template: a file with a Jinja template, or its text, in place of all that the model brings. Raises WeightsError
    when there is no tokenizer, or one of an unsupported kind, and ConfigError for a template that is none.
    """
    vocabulary = _load_vocabulary(Path(path))
    if chat_template is None:
        return Tokenizer(vocabulary)
    source = read_template(chat_template)
    try:
        ChatTemplate(source)
    except RequestError as error:
        raise ConfigError(f"chat_template: {error}") from None
    return Tokenizer(replace(vocabulary, chat_templates={"default": source}))


def read_template(chat_template: str) -> str:
    """The text of a template that is given as a file or as itself. Raises ConfigError."""
    if not chat_template:
        raise ConfigError("chat_template must not be empty; leave it out for the model's own")
    if "{" in chat_template or "\n" in chat_template:
        return chat_template
    try:
        return Path(chat_template).read_text("utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(
            f"chat_template {chat_template} cannot be read ({why}); give a file with a Jinja template, or its text"
        ) from None


def _load_vocabulary(path: Path) -> Vocabulary:
    if path.is_dir() or path.name == "tokenizer.json":
        from noria.text.tokenizer_json import load_vocabulary

        return load_vocabulary(path if path.is_dir() else path.parent)
    if path.suffix == ".gguf":
        from noria.text.tokenizer_gguf import vocabulary_from_metadata
        from noria.weights.gguf_file import read_metadata

        return vocabulary_from_metadata(read_metadata(path), path)
    if not path.exists():
        raise WeightsError(f"{path}: no such file or folder")
    raise WeightsError(f"{path} is no tokenizer; give a folder with tokenizer.json or a .gguf file")


def no_tokenizer() -> Tokenizer:
    """For an engine that speaks token ids only: refuses to encode, and every id stands for no text."""

    def refuse(text: str) -> list[int]:
        raise RequestError("there is no tokenizer (skip_tokenizer_init): give the prompt as token ids")

    return Tokenizer(Vocabulary(encode_text=refuse, pieces=(), special_ids=frozenset()))

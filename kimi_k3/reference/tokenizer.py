"""The tiny configurations' tokenizer (512 entries, byte-level BPE built in code) and the chat format.

Ids 0-255 are the bytes, so any text survives encoding and decoding; then merges of common English pairs,
then reserved ids, then the special tokens. A checkpoint folder with a ``tokenizer.json`` brings its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 512
OPEN, CLOSE, SEP = "<|open|>", "<|close|>", "<|sep|>"
BOS, EOS = "[BOS]", "<|end_of_msg|>"
#: Ids 503-511. The mask is the drafter's placeholder for tokens still to be drafted.
SPECIAL_TOKENS = (OPEN, CLOSE, SEP, BOS, EOS, "<|media|>", "<|mask|>", "<|unused|>", "[PAD]")
FIRST_SPECIAL = VOCAB_SIZE - len(SPECIAL_TOKENS)

#: Merges in rank order, left+right, "_" for a space. No digits: a number has one spelling.
_MERGE_TABLE = """
_+t h+e _+a i+n r+e o+n e+r _t+he _+s a+t _+o n+d _+w o+r e+n e+s i+t i+s o+u _+c in+g _+f _+b _+p a+l a+r l+l
_+h _o+f _+d t+o _t+o e+d _a+nd _+n _+l _+m _+g _+e _+i u+n i+c _w+h _i+n _i+s _+y _+r _r+e _+A _+Q _+T _+W _+I
q+u t+i ti+on b+e l+e v+e c+h s+h i+l a+s m+e u+m u+s u+r c+t l+a a+n h+at _t+hat w+er w+it wit+h _+with _wh+at
a+d e+e o+w g+e p+er s+t i+v iv+e i+d m+o r+o l+y o+l u+t e+t en+t a+ll f+or _f+or _b+e _h+e _s+he _y+ou a+y i+r
_n+um _num+b _numb+er _+= _++ _+- _+( _+: .+_ an+s A+n An+s Ans+wer qu+es ques+tion _+question c+o co+m
t+er m+ent e+l i+m p+l p+o s+e t+e a+b a+c a+g a+m a+p c+k e+m i+g ig+h igh+t k+e o+d o+p o+t
"""


@cache
def _alphabet() -> tuple[str, ...]:
    """The printable character that stands for each byte in byte-level BPE files (the GPT-2 convention).

    Printable Latin-1 bytes stand for themselves; the others take the characters from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = iter(range(0x100, 0x200))
    return tuple(chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256))


def merge_pairs() -> list[tuple[str, str]]:
    """The merge table over the byte alphabet; both halves of each exist before it, and no result twice."""
    space = _alphabet()[0x20]
    known, pairs = set(_alphabet()), []
    for entry in _MERGE_TABLE.split():
        cut = entry.index("+", 1)  # a "+" in front is the plus sign itself
        left, right = (part.replace("_", space) for part in (entry[:cut], entry[cut + 1 :]))
        if left + right in known or left not in known or right not in known:
            raise ValueError(f"merge {entry!r}: expected two known halves and a new result")
        pairs.append((left, right))
        known.add(left + right)
    return pairs


def build_tokenizer() -> Tokenizer:
    """The 512-entry tokenizer; equal calls give equal tokenizers, byte for byte."""
    vocab = {character: byte for byte, character in enumerate(_alphabet())}
    pairs = merge_pairs()
    for left, right in pairs:
        vocab[left + right] = len(vocab)
    for free in range(len(vocab), FIRST_SPECIAL):
        vocab[f"<|reserved_{free}|>"] = free
    for token in SPECIAL_TOKENS:
        vocab[token] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


class TextCodec:
    """Text to ids and back. ``token_bytes`` is what stop strings and streaming work on."""

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self.tokenizer = build_tokenizer() if tokenizer is None else tokenizer
        self.vocab_size = self.tokenizer.get_vocab_size(with_added_tokens=True)
        byte_of = {character: byte for byte, character in enumerate(_alphabet())}
        added = set(self.tokenizer.get_added_tokens_decoder())
        self._bytes: list[bytes] = []
        self._text: list[bytes] = []
        for token_id in range(self.vocab_size):
            token = self.tokenizer.id_to_token(token_id) or ""
            bytewise = token_id not in added and all(c in byte_of for c in token)
            self._bytes.append(bytes(byte_of[c] for c in token) if bytewise else token.encode())
            placeholder = token_id in added or token.startswith("<|reserved_")
            self._text.append(b"" if placeholder else self._bytes[-1])

    @staticmethod
    def load(folder: Path) -> TextCodec:
        """The tokenizer of a checkpoint folder; the built-in one where there is none."""
        path = folder / "tokenizer.json"
        return TextCodec(Tokenizer.from_file(str(path))) if path.is_file() else TextCodec()

    def save(self, folder: Path) -> None:
        self.tokenizer.save(str(folder / "tokenizer.json"))

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of ``text``. Spellings of special tokens become those tokens unless ``special`` is False."""
        self.tokenizer.encode_special_tokens = not special
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; a special token's are its spelling. May be part of a character."""
        return self._bytes[token_id]

    def text_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for in ordinary text; none for special and reserved tokens."""
        return self._text[token_id]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text, special tokens included; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self._bytes[t] for t in token_ids).decode("utf-8", errors="replace")


# -- chat ----------------------------------------------------------------------------------------------------

#: Changes whenever :func:`chat_segments` does, so that prompts of different formats are told apart.
CHAT_TEMPLATE_VERSION = "kimi-k3-xtml/1"


def chat_segments(
    messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True, thinking: bool = True
) -> list[tuple[str, bool]]:
    """A conversation as (text, may contain markers) pieces, in order.

    Every message is an XTML element with channels inside; contents are plain text, whatever they spell. The
    generation prompt opens the assistant's message and its first channel (``think``, or ``response``).
    """
    pieces: list[tuple[str, bool]] = [(BOS, True)]
    for number, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in ("system", "user", "assistant") or not isinstance(content, str):
            raise ValueError(
                f"message {number}: role {role!r} with {type(content).__name__} content, "
                "expected role system, user or assistant and text content"
            )
        pieces += [(f"{OPEN}message{SEP}{OPEN}role{SEP}{role}{CLOSE}role{SEP}{OPEN}response{SEP}", True)]
        pieces += [(content, False), (f"{CLOSE}response{SEP}{CLOSE}message{SEP}{EOS}", True)]
    if add_generation_prompt:
        channel = "think" if thinking else "response"
        pieces.append((f"{OPEN}message{SEP}{OPEN}role{SEP}assistant{CLOSE}role{SEP}{OPEN}{channel}{SEP}", True))
    return pieces


def render_chat(
    messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True, thinking: bool = True
) -> str:
    """The conversation as one string, for logs and for harnesses that send text."""
    segments = chat_segments(messages, add_generation_prompt=add_generation_prompt, thinking=thinking)
    return "".join(text for text, _ in segments)


def encode_chat(
    codec: TextCodec,
    messages: Sequence[Mapping[str, str]],
    *,
    add_generation_prompt: bool = True,
    thinking: bool = True,
) -> list[int]:
    """The conversation as ids; markers spelled inside a message's content stay text."""
    segments = chat_segments(messages, add_generation_prompt=add_generation_prompt, thinking=thinking)
    return [token for text, special in segments for token in codec.encode(text, special=special)]


def chat_template_digest() -> str:
    """SHA-256 of the format as it renders a fixed conversation: equal digests mean equal prompts."""
    sample = [{"role": r, "content": f"<{r}>"} for r in ("system", "user", "assistant")]
    text = CHAT_TEMPLATE_VERSION + "".join(render_chat(sample, thinking=t) for t in (True, False))
    return hashlib.sha256(text.encode()).hexdigest()

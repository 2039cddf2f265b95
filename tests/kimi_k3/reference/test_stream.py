"""Streamed text: what was sent is never taken back, and together it is the completion's text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from standin import CODEC, EOS, Guesser, build, request

from kimi_k3.reference.chat import ChannelReader
from kimi_k3.reference.stream import Stream
from kimi_k3.reference.tokenizer import CLOSE, OPEN, SEP

TEXTS = st.text(alphabet="ab€😀 .", min_size=1, max_size=24)


@settings(max_examples=60, deadline=None)
@given(text=TEXTS, stops=st.lists(st.text(alphabet="ab€ .", min_size=1, max_size=3), max_size=2), drafted=st.booleans())
def test_pieces_add_up_to_the_text_and_stop_strings_never_show(text: str, stops: list[str], drafted: bool) -> None:
    """Tokens are forced byte by byte, so characters and stop strings are split; then one sampled token may stop."""
    forced = list(text.encode())
    options = {"draft_length": 3, "drafter": Guesser(3, ragged=True)} if drafted else {}
    engine = build(max_context=256, **options)
    state = engine.submit(request("a", tokens=len(forced) + 4, forced=forced, stop=tuple(stops), logprobs=1))
    stream, sent, tokens, scored, index = Stream(state), "", [], [], 0
    while state.finish_reason is None:
        if engine.step("x", index):
            delta = stream.take()
            sent += delta.text
            tokens += delta.token_ids
            scored += delta.logprobs or []
        index += 1
    done = state.completion()
    assert (sent, tokens, scored) == (done.text, done.token_ids, done.logprobs)
    assert delta.finish_reason == done.finish_reason
    if done.finish_reason == "stop":
        assert len(done.token_ids) > len(forced)


def test_beginnings_of_stop_strings_and_characters_wait() -> None:
    engine = build(max_context=256)
    text = "x€a.b.c"
    forced = list(text.encode())
    state = engine.submit(request("a", tokens=len(forced), forced=forced, stop=("b.q",)))
    stream, pieces = Stream(state), []
    for index in range(len(forced)):
        engine.step("x", index)
        pieces.append(stream.take().text)
    assert pieces == ["x", "", "", "€", "a", ".", "", "", "b.c"]


def test_channels_of_a_chat() -> None:
    whole = f"let me see{CLOSE}think{SEP}{OPEN}response{SEP}fine <|{CLOSE}response{SEP}{CLOSE}message{SEP}"
    for step in (1, 3, 1000):
        reader = ChannelReader(thinking=True)
        parts = [reader.feed(whole[i : i + step]) for i in range(0, len(whole), step)]
        parts.append(reader.feed("", final=True))
        assert "".join(r for r, _ in parts) == "let me see"
        assert "".join(a for _, a in parts) == "fine <|"
    assert ChannelReader(thinking=False).feed(f"yes{CLOSE}response") == ("", "yes")
    cut = ChannelReader(thinking=False)
    assert (cut.feed("no<|clo"), cut.feed("", final=True)) == (("", "no"), ("", "<|clo"))
    assert CODEC.decode([EOS]) == "<|end_of_msg|>"

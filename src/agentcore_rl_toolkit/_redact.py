"""Keep secrets out of what leaves the process: by value, by field name, and inside URLs.

A :class:`Redactor` is told the secrets of one rollout or session and masks them wherever they turn up.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

MASK = "***"

# Stand-ins that people type where a key is required. Masking them would only garble messages.
_PLACEHOLDERS = frozenset({"empty", "none", "null", "true", "false", "dummy", "bearer", "basic"})
_MIN_LENGTH = 4
_MIN_CERTAIN, _MIN_ENVIRONMENT = 8, 16  # shorter values may be ordinary words, which must not vanish from results

_SECRET_NAME = re.compile(
    r"secret|passw|passphrase|credential|authorization|cookie|bearer"  # anywhere in the name
    r"|(?:key|token|auth|pwd)$"  # api_key, x-api-key, accessToken; not keyword, max_tokens, tokenizer
    r"|(?:^|[_\-.])(?:key|keys|token|auth|pwd)(?:[_\-.]|$)",  # key_id, keys, token-value
    re.IGNORECASE,
)
_CERTAIN_NAME = re.compile(  # names that are never given to anything else, but to the special tokens of a tokenizer
    r"(?i:(?:^|[_\-.])(?:api[_\-]?key|authorization|cookie|secret|password|passwd|private_key|access_key(?:_id)?)$)"
    r"|(?:ApiKey|apiKey|Secret|Password|accessKey|AccessKey|AccessKeyId)$"
    r"|(?<!bos)(?<!eos)(?<!pad)(?<!unk)(?<!sep)(?<!cls)(?<!mask)(?:_token|-token|[a-z]Token)$",
)
_IN_URL = re.compile(
    r"(/sessions/"  # the gateway's per-session URL holds the session's key
    r"|://[^\s/:@]*:(?=[^\s/@]+@)"  # user:password@
    r"|[?&;][^\s=&?;#]{0,64}?(?:key|token|secret|passw|auth|signature|credential)[^\s=&]{0,64}=)"
    r"([^\s/?#&;@'\"<>]++)(?!/agent\.log)",  # a folder of the local runtime is no URL
    re.IGNORECASE,
)
_NAMED = re.compile(  # api_key='…', "password": "…", OPENAI_API_KEY=…; a bare value without a digit is rather code
    r"((?:(?:api|access|private|secret)[_-]?key(?:[_-]id)?|secret|password|passwd|authorization"
    r"|(?<!bos)(?<!eos)(?<!pad)(?<!unk)(?<!sep)(?<!cls)(?<!mask)[_-]token)"
    r"\\?[\"']?\s{0,2}[=:]\s{0,2})"
    r"(?:(?P<quote>\\?[\"'])(?P<quoted>[^\"'\\\n]{4,})(?P=quote)|(?=[^\s\"',;&]{0,200}\d)[^\s\"',;&()\[\]{}\\]{8,})",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\b(Bearer|Basic)\s+[A-Za-z0-9._~+/=-]{4,}", re.IGNORECASE)
_KEY_SHAPE = re.compile(  # keys that say themselves what they are
    r"\b(?:(?:AKIA|ASIA)[A-Z2-7]{16}|(?:sk-|hf_|gh[pousr]_|github_pat_|xox[abprs]-)[A-Za-z0-9_-]{16,})\b"
)

# pydantic, reprlib and many a log line shorten what they quote: 'sk-live-abcd...wxyz', 'sk-live-ab'..., sk-live- [...]
_ELLIPSES = "...", "…", "\\u2026"  # `in` is twice as quick as a search
_ELLIPSIS = re.compile(r"\.\.\.+|…|\\u2026")
_MIN_SHORTENED, _MIN_PART = 16, 8  # characters: of a secret whose parts are masked too, and of such a part
_GAP = 3  # characters between a part and the ellipsis at most: a quote, a space, a bracket


def is_secret_name(name: str) -> bool:
    """Whether a field of this name is taken to hold a secret (``api_key``, ``Authorization``, ``db-password``)."""
    return _SECRET_NAME.search(name) is not None


def is_certain_name(name: str) -> bool:
    """Whether a field of this name holds a secret beyond doubt: ``api_key`` and ``hub_token``, not ``answer_key``."""
    return _CERTAIN_NAME.search(name) is not None


def find_secrets(value: Any, *, certain: bool = False) -> Iterator[str]:
    """Every secret string in a JSON-like value: under secret-looking names, and the keys inside URLs.

    ``certain``: only strings of 8 characters and more under names that leave no doubt.
    """
    return _find(value, is_certain_name if certain else is_secret_name, _MIN_CERTAIN if certain else 0, False)


def _find(value: Any, is_secret: Callable[[str], bool], shortest: int, secret: bool) -> Iterator[str]:
    if isinstance(value, str):
        if secret and len(value) >= shortest:
            yield value
        elif "://" in value:
            yield from (match[2] for match in _IN_URL.finditer(value) if len(match[2]) >= shortest)
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _find(item, is_secret, shortest, secret or is_secret(str(name)))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _find(item, is_secret, shortest, secret)


def environment_secrets() -> Iterator[str]:
    """The secrets of this process's environment, such as ``AWS_SECRET_ACCESS_KEY``; 16 characters and more."""
    for name, value in os.environ.items():
        if len(value) >= _MIN_ENVIRONMENT and (is_certain_name(name.lower()) or name == "AWS_ACCESS_KEY_ID"):
            yield value


class Redactor:
    """Masks the given secret values; in texts also what the name before it, a URL, or its own form says is one.

    Values shorter than 4 characters and placeholders such as ``EMPTY`` are not masked by value. Of values of 16 and
    more, a beginning of at least 8 before an ellipsis, and an end of at least 8 after one, are masked as well.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        known = {s.strip() for s in secrets}
        known |= {s.partition(" ")[2].strip() for s in known if s.lower().startswith(("bearer ", "basic "))}
        known = {s for s in known if len(s) >= _MIN_LENGTH and s.lower() not in _PLACEHOLDERS}
        longest_first = sorted({form for s in known for form in _forms(s)}, key=lambda s: (-len(s), s))
        self._known = re.compile("|".join(map(re.escape, longest_first))) if known else None
        self._shortened = {form for s in known if len(s) >= _MIN_SHORTENED for form in _forms(s)}
        self._all_shortened = "\0".join(self._shortened)

    def text(self, text: str) -> str:
        """``text`` with every secret replaced by ``***``."""
        text = self._without_known(text)
        text = _KEY_SHAPE.sub(MASK, _IN_URL.sub(rf"\1{MASK}", text))
        return _NAMED.sub(_mask_named, _BEARER.sub(rf"\1 {MASK}", text))

    def values(self, value: Any) -> Any:
        """A JSON-like value that must stay as it is, but for known secrets and strings under certain names."""
        if isinstance(value, str):
            return self._without_known(value)
        if isinstance(value, Mapping):
            return {
                self.values(name): MASK if _is_certain_secret(name, item) else self.values(item)
                for name, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.values(item) for item in value]
        return value

    def fields(self, value: Any) -> Any:
        """A JSON-like value with known secrets masked, and everything under secret-looking names."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {
                self.text(str(name)): MASK if item is not None and is_secret_name(str(name)) else self.fields(item)
                for name, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.fields(item) for item in value]
        return value

    def _without_known(self, text: str) -> str:
        if self._known is None:
            return text
        if any(ellipsis in text for ellipsis in _ELLIPSES):
            text = self._without_parts(text)  # first: a shorter secret inside a part would break it up
        return self._known.sub(MASK, text)

    def _without_parts(self, text: str) -> str:
        pieces, done = [], 0
        for start, end in sorted(self._parts(text)):
            if start >= done:
                pieces += [text[done:start], MASK]
            done = max(done, end)
        return "".join([*pieces, text[done:]])

    def _parts(self, text: str) -> Iterator[tuple[int, int]]:
        """Where parts of shortened secrets begin and end."""
        for ellipsis in _ELLIPSIS.finditer(text):
            for gap in range(_GAP + 1):
                end, start = ellipsis.start() - gap, ellipsis.end() + gap
                # One search through all secrets at once, since what is beside an ellipsis is hardly ever a secret's.
                if end >= _MIN_PART and text[end - _MIN_PART : end] in self._all_shortened:
                    yield from ((at, end) for s in self._shortened if (at := _find_head(text, end, s)) >= 0)
                if text[start : start + _MIN_PART] in self._all_shortened:
                    yield from ((start, at) for s in self._shortened if (at := _find_tail(text, start, s)) >= 0)


def _mask_named(match: re.Match[str]) -> str:
    if (match["quoted"] or "").lower() in _PLACEHOLDERS:
        return match[0]
    quote = match["quote"] or ""
    return f"{match[1]}{quote}{MASK}{quote}"


def _is_certain_secret(name: object, value: object) -> bool:
    return isinstance(value, str) and len(value) >= _MIN_CERTAIN and is_certain_name(str(name))


def _forms(secret: str) -> set[str]:
    """How a secret may show up: as it is, percent-encoded, escaped by JSON, or by repr() in either kind of quotes."""
    single_quoted = repr('"' + secret)[2:-1]
    return {secret, _quote(secret), json.dumps(secret)[1:-1], single_quoted, single_quoted.replace("\\'", "'")}


def _find_head(text: str, end: int, secret: str) -> int:
    """Where the longest beginning of ``secret`` that ends at ``end`` begins; -1 if there is none."""
    head = secret[:_MIN_PART]
    at = text.find(head, max(0, end - len(secret)), end)
    while at >= 0 and not secret.startswith(text[at:end]):
        at = text.find(head, at + 1, end)
    return at


def _find_tail(text: str, start: int, secret: str) -> int:
    """Where the longest end of ``secret`` that begins at ``start`` ends; -1 if there is none."""
    tail = secret[-_MIN_PART:]
    at = text.rfind(tail, start, start + len(secret))
    while at >= 0 and not secret.endswith(text[start : at + _MIN_PART]):
        at = text.rfind(tail, start, at + _MIN_PART - 1)
    return at + _MIN_PART if at >= 0 else -1


def _quote(text: str) -> str:
    return quote(text.encode("utf-8", "replace"), safe="")

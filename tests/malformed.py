"""Malformed HTTP requests and byte streams for the service, each a function of its number."""

import json
import random
from collections.abc import Callable
from typing import Any

from servers import request

ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/translate": {"text": "A dog.", "source": "en", "target": "de", "beam": 2, "n_best": 2},
    "/translate": {"q": "A dog.", "source": "en", "target": "de", "format": "text", "alternatives": 1},
    "/v2/translate": {"text": ["A dog."], "source_lang": "EN", "target_lang": "DE"},
    "/": {"inputs": "A dog.", "parameters": {"src_lang": "en", "tgt_lang": "de"}},
    "/detect": {"q": "A dog."},
    "/v1/chat/completions": {"model": "en-de", "messages": [{"role": "user", "content": "A dog."}], "n": 1},
    "/v1/completions": {"model": "gpt", "prompt": "A dog.", "n": 1, "max_tokens": 5, "temperature": 0.5, "stop": "x"},
}
TEXT_FIELDS = ("text", "q", "inputs", "messages", "prompt")
FORM = "Content-Type: application/x-www-form-urlencoded"


def malformed(number: int, seed: int = 1) -> bytes:
    """A request that no endpoint may accept, although some of the damage to single fields is harmless."""
    draw = random.Random(f"{seed} {number}")
    path = draw.choice(list(ENDPOINTS))
    return draw.choice(_KINDS)(draw, path, json.loads(json.dumps(ENDPOINTS[path])))


def _value(draw: random.Random, depth: int = 0) -> Any:
    """Some JSON."""
    if depth < 3 and draw.random() < 0.3:
        values = [_value(draw, depth + 1) for _ in range(draw.randrange(4))]
        return values if draw.random() < 0.5 else {draw.choice(["text", "q", "a", ""]): value for value in values}
    numbers = (0, -1, 2**31, -(2**63), 10**30, 10**400, 1e308, -0.0, 1.5)
    return draw.choice((None, True, *numbers, "", "x", "-1", "\x00", "\ud800", "a" * 50))


def _wrong_text(draw: random.Random, path: str, fields: dict[str, Any]) -> bytes:
    """The text is no text."""
    (name,) = set(TEXT_FIELDS) & set(fields)
    fields[name] = draw.choice([None, True, 5, -1.5, 10**30, {}, {"a": 1}, [None], [["a"]], [1, "a"], [{}], [[[]]]])
    return request(path, fields)


def _no_text(draw: random.Random, path: str, fields: dict[str, Any]) -> bytes:
    left = {name: value for name, value in fields.items() if name not in TEXT_FIELDS}
    return request(path, draw.choice([left, None, [], 5, "text", [fields], {}, b"null", b'""']))


def _damaged_field(draw: random.Random, path: str, fields: dict[str, Any]) -> bytes:
    """Some are harmless, such as null for an option."""
    for _ in range(draw.randrange(1, 4)):
        fields[draw.choice([*fields, "beam", "n_best", "max_length", "prefix", "words", "x"])] = _value(draw)
    return request(path, fields)


def _too_much(draw: random.Random, path: str, fields: dict[str, Any]) -> bytes:
    (name,) = set(TEXT_FIELDS) & set(fields)
    long = "a " * draw.randrange(10_001, 100_000)
    many: Any = ["a"] * draw.randrange(129, 5000)
    fields[name] = draw.choice([long, [long], many if path != "/v1/chat/completions" else long])
    if name == "messages":
        fields[name] = [{"role": "user", "content": long}]
    return request(path, fields)


def _broken_json(draw: random.Random, path: str, fields: dict[str, Any]) -> bytes:
    good = json.dumps(fields).encode()
    cut = draw.randrange(1, len(good))
    bad = [
        good[:cut], good + b"}", good.replace(b":", b"=", 1), b"\xef\xbb\xbf" + good[:-1],
        good.decode().encode("utf-16"), good.replace(b"dog", b"\xff\xfe\xc3"),
        good.replace(b"dog", b"\\ud800"), good.replace(b"dog", b"\\x41"),
        good.replace(b'"A dog."', b"NaN"), good.replace(b'"A dog."', b"-Infinity"), good.replace(b'"', b"'"),
        b"[" * draw.randrange(1, 200_000), b'{"text":' * draw.randrange(1, 50_000), b"1" * draw.randrange(5000, 90_000),
        draw.randbytes(draw.randrange(1, 500)), b"\x00" * draw.randrange(1, 500), b"<text>A dog.</text>",
    ]  # fmt: skip
    return request(path, draw.choice(bad))


def _broken_form(draw: random.Random, path: str, fields: dict[str, Any]) -> bytes:
    bad = [b"", b"&" * 5000, b"a=b&" * 3000, b"q=%ff%fe&target=de", b"text=%C3&target_lang=DE", b"q=%zz", b"=", b"%",
           b"q\x00=a", b"target=de", b"q=a&q=b&target=de&target=en&source=xx", draw.randbytes(100)]  # fmt: skip
    kind = draw.choice([FORM, FORM + "; charset=utf-16", "Content-Type: multipart/form-data; boundary=x"])
    body = draw.choice(bad)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _broken_headers(draw: random.Random, path: str, fields: dict[str, Any]) -> bytes:
    """Some are harmless: an unknown header, for one."""
    head = draw.choice(
        [
            "Content-Length: -1", "Content-Length: x", "Content-Length: 99999999999999999999",
            "Content-Length: 5\r\nContent-Length: 6",
            "Transfer-Encoding: chunked\r\nContent-Length: 5", "Transfer-Encoding: gzip",
            "Transfer-Encoding: chunked, x",
            "X\x00: a", "X : a", ": a", "X" * 70_000, "X: " + "a" * 300_000, "no colon", "X: a\rb",
            "\x01\x02\x03: \x7f",
        ]
    )  # fmt: skip
    return f"POST {path} HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\nhello".encode("latin-1")


def _broken_chunks(draw: random.Random, path: str, fields: dict[str, Any]) -> bytes:
    body = draw.choice(
        [b"zz\r\nhello\r\n0\r\n\r\n", b"-5\r\nhello\r\n", b"fffffffffffffffff\r\nx", b"5\r\nhelloxx0\r\n\r\n"]
    )
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode() + body


def _broken_line(draw: random.Random, path: str, fields: dict[str, Any]) -> bytes:
    """The first line: method, path, version."""
    line = draw.choice(
        [
            "POST", f"GET {path}x HTTP/1.1", f"DELETE {path} HTTP/1.1", f"FOO {path} HTTP/1.1", f"POST {path} HTTP/9.9",
            f"POST {path} JUNK", f"post {path} HTTP/1.1", f"POST {path}/../../etc/passwd HTTP/1.1",
            "GET /%00%ff HTTP/1.1",
            "GET /models/%ff HTTP/1.1", f"POST /models/{'x' * 5000} HTTP/1.1", "GET //// HTTP/1.1", "GET * HTTP/1.1",
            f"POST {'/a' * 40_000} HTTP/1.1", "\x16\x03\x01\x02\x00\x01", f"PUT {path}?{'q=1&' * 5000} HTTP/1.1",
            "GET  HTTP/1.1",
            "CONNECT a:1 HTTP/1.1", "OPTIONS * HTTP/1.1", "PRI * HTTP/2.0",
        ]
    )  # fmt: skip
    return f"{line}\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode("latin-1")


_Kind = Callable[[random.Random, str, dict[str, Any]], bytes]
_KINDS: tuple[_Kind, ...] = (
    _wrong_text, _no_text, _damaged_field, _too_much, _broken_json, _broken_json, _broken_form, _broken_headers,
    _broken_chunks, _broken_line,
)  # fmt: skip


_METHODS = b"GET POST HEAD PUT DELETE PATCH OPTIONS TRACE CONNECT PRI QUERY get".split()
_PATHS = [
    *(path.encode() for path in ENDPOINTS),
    *b"/health /ready /metrics /v2/glossaries /v2/glossaries/x /models/en-de * x:1 http://x/health /%ff".split(),
]
_FIELDS = [
    b"", b"Connection: close", b"Connection: keep-alive", b"Expect: 100-continue", b"Expect: 200-ok", b"TE: trailers",
    b"Connection: Upgrade\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk", b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", b"Upgrade: TLS/1.0", b"Cookie: a=b",
    b"Content-Length: 0", b"Content-Length: 3", b"Transfer-Encoding: chunked", b"Trailer: X", b"Origin: null",
    b"Content-Type: text/plain", b"X-Request-Timeout: 0.5", b"Range: bytes=0-1", b"X: " + b"a" * 5000,
]  # fmt: skip


def mutated_stream(number: int, seed: int = 1) -> bytes:
    """One to three pipelined requests of any method, with trailers and offers of other protocols, then damaged."""
    draw = random.Random(f"stream {seed} {number}")
    data = bytearray(b"".join(_any_request(draw) for _ in range(draw.randrange(1, 4))))
    for _ in range(draw.choice((0, 1, 1, 2, 4, 16))):
        place = draw.randrange(len(data))
        end = min(len(data), place + draw.randrange(1, 40))
        kind = draw.randrange(5)
        if kind == 0:
            data[place] = draw.randrange(256)
        elif kind == 1:
            data[place:place] = draw.choice([b"\r\n", b"\r", b"\n", b"\0", b" ", b":", b"0\r\n\r\n", b"\r\n\r\n"])
        elif kind == 2:
            data[place:place] = data[place:end]
        elif place > 10:
            del data[place : end if kind == 3 else len(data)]
    return bytes(data)


def _any_request(draw: random.Random) -> bytes:
    body = json.dumps(ENDPOINTS[draw.choice(list(ENDPOINTS))]).encode()
    fields = [b"Host: x", *draw.sample(_FIELDS, draw.randrange(4))]
    kind = draw.randrange(3)
    if kind == 1:
        fields.append(b"Content-Length: %d" % len(body))
    elif kind == 2:
        cut, extension = draw.randrange(1, len(body)), draw.choice([b"", b";a=b", b" "])
        trailers = draw.choice([b"", b"X: y\r\n", b"Content-Length: 5\r\n", b"X: " + b"a" * 20_000 + b"\r\n"])
        chunks = (b"%x%s\r\n%s\r\n" % (len(part), extension, part) for part in (body[:cut], body[cut:]))
        fields.append(b"Transfer-Encoding: chunked")
        body = b"".join(chunks) + b"0\r\n" + trailers + b"\r\n"
    line = b"%s %s HTTP/1.%d" % (draw.choice(_METHODS), draw.choice(_PATHS), draw.choice((0, 1, 1, 1)))
    return b"\r\n".join([line, *filter(None, fields), b"", body if kind else b""])

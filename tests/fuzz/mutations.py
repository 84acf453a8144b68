"""Mutations of files: bytes, JSON, TOML, tensors, arrays, TMX. Each takes the content and a random generator.

Each returns the damaged content and a word for the table. A mutation may leave the content unchanged by chance.
"""

# ruff: noqa: E501  (long tables of strange values)
import io
import json
import random
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from sentencepiece.sentencepiece_model_pb2 import ModelProto

Mutation = Callable[[bytes, random.Random], bytes]

PATHS = (
    "../canary/victim",
    "/etc/passwd",
    "..",
    "a/../../../canary/victim",
    "x\x00y",
    "~/.profile",
    "/dev/zero",
    "",
    ".",
)
STRANGE: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 1 << 31, 1 << 63, 1 << 70, -(1 << 63), 10**300, 0.5, -0.5, 1e308, 1e-320,
    float("nan"), float("inf"), float("-inf"), "", "x", "0", "nan", "\ud800", "\u202e\x1b[2J", "x" * 100_000, [], {},
    [[]], [None], ["x"], [1, 2, 3], {"x": 1}, {"": None}, [[[[[[[[[[1]]]]]]]]]], [0] * 10_000, *PATHS,
)  # fmt: skip


# -- bytes of any file


def truncate(content: bytes, draw: random.Random) -> bytes:
    n = len(content)
    return content[: draw.choice([0, 1, 7, 8, 9, n // 2, max(0, n - 1), draw.randrange(n + 1)])]


def flip(content: bytes, draw: random.Random) -> bytes:
    if not content:
        return b"\x00"
    changed = bytearray(content)
    for _ in range(draw.choice([1, 1, 1, 2, 8, 64])):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def flip_early(content: bytes, draw: random.Random) -> bytes:
    """Flip bits near the start, where headers are."""
    n = draw.choice([16, 64, 512])
    return flip(content[:n], draw) + content[n:]


def insert(content: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(content) + 1)
    what = draw.choice(
        [b"\x00", b"\n", b"\r", b"\xff\xfe", b"{", b'"', b"\xef\xbb\xbf", draw.randbytes(draw.randrange(1, 200))]
    )
    return content[:place] + what * draw.choice([1, 1, 3, 1000]) + content[place:]


def cut_out(content: bytes, draw: random.Random) -> bytes:
    a, b = sorted(draw.randrange(len(content) + 1) for _ in range(2))
    return content[:a] + content[b:]


def repeat(content: bytes, draw: random.Random) -> bytes:
    a, b = sorted(draw.randrange(len(content) + 1) for _ in range(2))
    return content[:b] + content[a:b] * draw.choice([1, 2, 5]) + content[b:]


def wipe(content: bytes, draw: random.Random) -> bytes:
    a, b = sorted(draw.randrange(len(content) + 1) for _ in range(2))
    return content[:a] + draw.choice([b"\x00", b"\xff", b" "]) * (b - a) + content[b:]


def garbage(content: bytes, draw: random.Random) -> bytes:
    return draw.randbytes(draw.choice([0, 1, 100, max(1, len(content))]))


def other_format(content: bytes, draw: random.Random) -> bytes:
    return draw.choice([b"PK\x03\x04" + content, b"\x80\x04cposix\nsystem\n(S'echo'\ntR.", b"<html></html>", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", b"null", b"[]", b"\n" * 1000])  # fmt: skip


BYTES: dict[str, Mutation] = {
    f.__name__: f for f in (truncate, flip, flip_early, insert, cut_out, repeat, wipe, garbage, other_format)
}


# -- JSON


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        found += _places(child, (*path, key))
    return found


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def dump(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=True).encode()


def change_value(value: Any, draw: random.Random) -> Any:
    """A copy of a JSON value with one change."""
    paths = _places(value)
    path = draw.choice(paths[1:] or paths)
    if not path:
        return draw.choice(STRANGE)
    parent, key = _at(value, path[:-1]), path[-1]
    old, fate = parent[key], draw.randrange(7)
    if fate == 0:
        parent.pop(key)
    elif fate == 1 and isinstance(parent, dict):
        parent[draw.choice(["x", "", key + "x", *PATHS])] = parent.pop(key)
    elif fate == 2 and isinstance(old, int | float) and not isinstance(old, bool):
        parent[key] = draw.choice([-old, old + 1, old - 1, old * 1000, float(old), str(old), 0, 1, 1 << 40])
    elif fate == 3:
        other = draw.choice(paths[1:])
        parent[key] = json.loads(json.dumps(_at(value, other)))
    elif fate == 4 and isinstance(old, str):
        parent[key] = draw.choice([old.upper(), old + "\x00", old[:-1], old * 50, "../" + old, "/" + old])
    else:
        parent[key] = draw.choice(STRANGE)
    return value


def json_value(content: bytes, draw: random.Random) -> bytes:
    value = json.loads(content)
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        value = change_value(value, draw)
    return dump(value)


def json_deep(content: bytes, draw: random.Random) -> bytes:
    n = draw.choice([200, 5_000, 200_000])
    deep = draw.choice([b"[" * n + b"]" * n, b'{"a":' * n + b"1" + b"}" * n, b"[" * n])
    place = content.rfind(b"}")
    return draw.choice([deep, content[:place] + b',"deep":' + deep + content[place:]])


def json_number(content: bytes, draw: random.Random) -> bytes:
    number = draw.choice(
        [b"1" * 5000, b"1e999", b"-1e999", b"NaN", b"Infinity", b"-0", b"0." + b"0" * 5000 + b"1", b"1" * 400]
    )
    place = content.rfind(b"}")
    return content[:place] + b', "n": ' + number + content[place:]


JSON: dict[str, Mutation] = {f.__name__: f for f in (json_value, json_deep, json_number)}


def jsonl_value(content: bytes, draw: random.Random) -> bytes:
    lines = content.splitlines()
    if not lines:
        return b"{}\n"
    i = draw.randrange(len(lines))
    lines[i] = draw.choice([*JSON.values()])(lines[i], draw)
    return b"\n".join(lines) + b"\n"


JSONL: dict[str, Mutation] = {"jsonl_value": jsonl_value}


# -- TOML


def toml_value(content: bytes, draw: random.Random) -> bytes:
    lines = content.decode().splitlines()
    places = [i for i, line in enumerate(lines) if "=" in line]
    i = draw.choice(places)
    values = ("-1", "0", "1e400", "nan", "inf", "9" * 5000, "''", "'x'", "[]", "{}", "[" * 3000, "{a=" * 2000, "true",
              "1979-05-27T07:32:00Z", "'" + "x" * 100_000 + "'", '"\\u0000"', '"../../canary/victim"', "'/dev/zero'",
              "[[1]]", "0xffffffffffffffffffff", "1_000_000_000_000", '"\\ud800"', '"""a\nb"""')  # fmt: skip
    key = lines[i].split("=")[0]
    lines[i] = draw.choice([f"{key}= {draw.choice(values)}", f"{key}= {draw.choice(values)}", f"{key.strip()}x = 1", lines[i] + "\n" + lines[i],
                            f"a{'.a' * draw.choice([3, 2000])} = 1", f"[{key.strip()}]", f'"{key.strip()}\\u0000" = 1', "'' = 1"])  # fmt: skip
    return "\n".join(lines).encode("utf-8", "surrogatepass")


TOML: dict[str, Mutation] = {"toml_value": toml_value}


# -- safetensors


def _parts(content: bytes) -> tuple[dict[str, Any], bytes]:
    n = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + n]), content[8 + n :]


def _joined(header: Any, body: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + body


def tensor_length(content: bytes, draw: random.Random) -> bytes:
    n = draw.choice([0, 1, 7, 1 << 20, 100_000_001, 1 << 31, 1 << 62, (1 << 64) - 1, len(content), len(content) - 8])
    return n.to_bytes(8, "little") + content[8:]


def tensor_header(content: bytes, draw: random.Random) -> bytes:
    header, body = _parts(content)
    name = draw.choice([key for key in header if key != "__metadata__"])
    entry = header[name]
    a, b = entry["data_offsets"]
    fate = draw.randrange(12)
    if fate == 0:
        entry["dtype"] = draw.choice(
            ["F64", "F16", "BF16", "I64", "I8", "U8", "BOOL", "F8_E4M3", "C64", "X", "", None, 3]
        )
    elif fate == 1:  # the same bytes with another type or shape
        kind, n = draw.choice([("I32", 4), ("U8", 1), ("F16", 2), ("BF16", 2), ("F64", 8), ("I64", 8), ("BOOL", 1)])
        entry["dtype"], entry["shape"] = kind, [(b - a) // n]
    elif fate == 2:
        entry["shape"] = entry["shape"][::-1] if draw.random() < 0.5 else [1, *entry["shape"]]
    elif fate == 3:
        entry["shape"] = draw.choice(
            [[-1], [1 << 62, 4], [1 << 32, 1 << 32], [0], [], None, "x", [1.5], [True], [[1]], [1 << 70]]
        )
    elif fate == 4:
        entry["data_offsets"] = draw.choice(
            [[b, a], [a, 1 << 62], [-8, b], [a, b, b], [a], None, [a + 1, b + 1], ["0", "4"], [a, a], [0.0, 4.0]]
        )
    elif fate == 5:
        header[draw.choice(["x", "", "../x", "\x00", name + ".", "__metadata__ "])] = header.pop(name)
    elif fate == 6:
        header.pop(name)
    elif fate == 7:
        header["__metadata__"] = draw.choice(
            [None, [], "x", {"a": 1}, {"aliases": "[1", "sha256": "0"}, {"aliases": "[]"}, {"sha256": 7}]
        )
    elif fate == 8 and isinstance(header.get("__metadata__"), dict):
        header["__metadata__"]["aliases"] = draw.choice(
            ['{"a":"b"}', "[1,2]", "3", "null", '{"x":3}', "{", '{"a":["b"]}', "[" * 100_000]
        )
    elif fate == 9:
        other = draw.choice([key for key in header if key != "__metadata__"])
        header[name], header[other] = header[other], header[name]
    elif fate == 10:
        return _joined(json_deep(json.dumps(header).encode(), draw), body)
    else:
        header = change_value(header, draw)
    return _joined(header, body)


def tensor_values(content: bytes, draw: random.Random) -> bytes:
    header, body = _parts(content)
    name = draw.choice([key for key in header if key != "__metadata__"])
    a, b = header[name]["data_offsets"]
    value = draw.choice(
        [
            struct.pack("<f", float("nan")),
            struct.pack("<f", float("inf")),
            b"\xff" * 4,
            b"\x00" * 4,
            struct.pack("<f", 1e38),
        ]
    )
    n = (b - a) // 4
    return _joined(header, body[:a] + value * n + body[a + 4 * n : b] + body[b:])


TENSORS: dict[str, Mutation] = {f.__name__: f for f in (tensor_length, tensor_header, tensor_header, tensor_values)}


# -- NumPy arrays


def _saved(array: Any) -> bytes:
    made = io.BytesIO()
    np.save(made, array)
    return made.getvalue()


def array_type(content: bytes, draw: random.Random) -> bytes:
    """Another type, or another number of dimensions or values."""
    array = np.load(io.BytesIO(content))
    others = [array.astype(kind) for kind in ("<f8", "<i8", "<i4", "|u1", ">u2", "|b1", "<c16", "<m8")]
    return _saved(
        draw.choice([*others, array.view("|u1"), array[None], array[:, None], array[:0], array[:-1], np.array(3)])
    )


def array_values(content: bytes, draw: random.Random) -> bytes:
    array = np.load(io.BytesIO(content)).copy()
    if not len(array):
        return content
    info = np.iinfo(array.dtype) if array.dtype.kind in "iu" else None
    for _ in range(draw.choice([1, 1, 5])):
        values = (
            [0, 1] if info is None else [info.min, info.max, 0, 1, min(300, info.max), min(65_000, info.max), array[-1]]
        )
        array[draw.randrange(len(array))] = draw.choice(values)
    return _saved(array[::-1] if draw.random() < 0.2 else array)


ARRAYS: dict[str, Mutation] = {f.__name__: f for f in (array_type, array_values)}


# -- SentencePiece models (protocol buffers)


def piece_model(content: bytes, draw: random.Random) -> bytes:
    """Change pieces, scores, types, options of trainer and normalizer, or the normalization table."""
    try:
        model = ModelProto.FromString(content)
    except DecodeError:
        return flip(content, draw)
    piece, fate = draw.choice(model.pieces), draw.randrange(8)
    if fate == 0:
        piece.piece = draw.choice(
            ["", "<unk>", "\u2581", "<0x41>", "<0xZZ>", "a" * 100_000, "\x00", draw.choice(model.pieces).piece]
        )
    elif fate == 1:
        piece.score = draw.choice([float("nan"), float("inf"), float("-inf"), 1e38, -1e38, 0.0])
    elif fate == 2:
        piece.type = draw.choice([1, 2, 3, 4, 5, 6])
    elif fate == 3:
        for _ in range(draw.choice([1, 5, len(model.pieces) - 1])):
            del model.pieces[draw.randrange(len(model.pieces))]
    elif fate == 4:
        model.pieces.append(piece)
    elif fate in (5, 6):
        model.normalizer_spec.precompiled_charsmap = _table(
            model.normalizer_spec.precompiled_charsmap or b"x" * 8, draw
        )
    else:
        spec = draw.choice([model.trainer_spec, model.normalizer_spec])
        field = draw.choice([f for f in spec.DESCRIPTOR.fields if f.cpp_type in (f.CPPTYPE_INT32, f.CPPTYPE_BOOL)])
        values = [0, 1] if field.cpp_type == field.CPPTYPE_BOOL else [-1, 0, 1, 5, 100, 1 << 30]
        setattr(spec, field.name, draw.choice(values))
    return bytes(model.SerializeToString())


def _table(table: bytes, draw: random.Random) -> bytes:
    """The normalizer's table: a length, as many bytes of a trie, and texts."""
    n, fate = int.from_bytes(table[:4], "little"), draw.randrange(4)
    if fate == 0:
        return (
            draw.choice([0, 4, n + 4, max(0, n - 4), len(table), 1 << 31, n // 2 & ~3]).to_bytes(4, "little")
            + table[4:]
        )
    if fate == 1:
        return table[: draw.randrange(len(table))]
    units = bytearray(table)
    end = 1200 if fate == 2 else n  # the root and its children, or all
    for _ in range(draw.choice([1, 10, 1000])):
        units[min(4 + draw.randrange(max(1, min(n, end))), len(units) - 1)] ^= 1 << draw.randrange(8)
    return bytes(units)


PIECES: dict[str, Mutation] = {"piece_model": piece_model}


# -- TMX


_DOCTYPES = (
    '<!DOCTYPE tmx [<!ENTITY a "aaaaaaaaaa"><!ENTITY c "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">]>',
    '<!DOCTYPE tmx [<!ENTITY c SYSTEM "file:///etc/passwd">]>',
    '<!DOCTYPE tmx SYSTEM "http://192.0.2.1/evil.dtd">',
    '<!DOCTYPE tmx [<!ENTITY % p SYSTEM "file:///etc/passwd"> %p;]>',
)
_TMX: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("<seg>", tuple("<seg>" + more for more in ("<bpt>", "<bpt>" * 5000, "<bpt>" * 200_000, "x" * (18 << 20)))),
    ('xml:lang="en"', ('lang="en"', 'xml:lang=""', "", f'xml:lang="{"e" * 100_000}"', 'xml:lang="en" xml:lang="de"')),
    ("<tu>", tuple("<tu" + "".join(f' a{i}="1"' for i in range(n)) + ">" for n in (10, 5000))),
    ("</seg>", ("</seg><seg>x</seg>", "", "<![CDATA[x<y]]></seg>", "&#0;</seg>", "&#xD800;</seg>", "&#10;</seg>")),
    ('encoding="UTF-8"', ('encoding="UTF-7"', 'encoding="x"', 'encoding="ISO-8859-1"', 'encoding="cp037"')),
)


def tmx(content: bytes, draw: random.Random) -> bytes:
    text, fate = content.decode(), draw.randrange(len(_TMX) + 2)
    if fate == 0:
        head, tail = text.split("<tmx", 1)
        text = (
            head
            + draw.choice(_DOCTYPES)
            + "<tmx"
            + tail.replace("<seg>", draw.choice(["<seg>", "<seg>&c;", "<seg>&a;"]))
        )
    elif fate == 1:
        return text.encode(draw.choice(["utf-16", "latin-1", "utf-32", "utf-7"]), "replace")
    else:
        old, new = _TMX[fate - 2]
        text = text.replace(old, draw.choice(new), 1)
    return text.encode("utf-8")


TMX: dict[str, Mutation] = {"tmx": tmx}


# -- lines of text


def text_line(content: bytes, draw: random.Random) -> bytes:
    lines = content.split(b"\n")
    i = draw.randrange(len(lines))
    strange = (b"", b" ", b"\x00", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", "\u2028".encode(), "\u0085".encode(), b"\x0b", b"\x1c",
               b"a\rb", b"\r", "e\u0301\u202e".encode(), "👩‍👩‍👧".encode(), b"\t", b"a\tb\tc\td", b"x" * 300_000, b"word " * 60_000, b'{"src": 1}',
               b'{"src": "a", "tgt": "b"}', b"<mask>", b"</s><s><pad>", b"\xf4\x90\x80\x80", b"[" * 100_000, b'{"src": "\\ud800", "tgt": ""}')  # fmt: skip
    what = draw.choice(strange)
    lines[i] = draw.choice([what, lines[i] + what, what + lines[i]])
    return b"\n".join(lines)


TEXT: dict[str, Mutation] = {"text_line": text_line}

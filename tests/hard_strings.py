# ruff: noqa: E501
"""Strings on which tokenizers are most likely to disagree."""

HARD = [
    # empty, and all kinds of white space
    "", " ", "   ", "\t", "\n", "\r\n", "\u00a0", "\u3000", "\u2028\u2029", "\u200b", "\u200b\u00a0\u3000", "\u1680\u180e",
    " leading", "trailing ", "  two   spaces ", "tab\tand\nline", "a\r\nb\rc", "a\x0bb\x0cc", "\u2581", "\u2581a\u2581", "\u2581 \u0120",
    # strings with a special meaning in vocabularies
    "[MASK] the [SEP] cat", "[CLS]", "[PAD][PAD]", "[UNK]", "[mask]", "[MASK]s", "<mask>", "[unused1]", "##able", "# #", "##",
    "a <|endoftext|> b", "<|endoftext|>", "<|endoftext|", "</s>", "a </s> man", "<s><pad><unk>", "<unk>", "⁇",
    ">>deu<< ein Hund", ">>deu<<", ">> not << a code", "x>>deu<< y", ">>deu<<>>fra<< a", " >>deu<< a", ">>deu", "<<>>",
    # accents, composed and decomposed; case
    "café cafe\u0301", "ÀÉÎ ß ẞ İ ı ŉ", "e\u0301\u0302\u0323", "\u0301", "Ångström A\u030angstro\u0308m \u212b", "ǅ ﬁ ﬃ ſ",
    "ΣΊΣΥΦΟΣ σίσυφος", "Straße STRASSE", "Ñandú n\u0303", "ệ e\u0302\u0323 ê\u0323 ẹ\u0302", "½ ² ⅷ ㎏ ﷺ", "ｆｕｌｌ　ｗｉｄｔｈ",
    # scripts
    "猫 cat猫", "漢字かな交じり文", "한국어 \u1112\u1161\u11ab", "𠀀𪚥", "नमस्ते ก็ ที่", "שָׁלוֹם مَرْحَبًا", "\u202eabc\u202c", "Привет, мир!",
    # emoji: of several code points, of skin and flags, joined
    "😀 the", "👩\u200d👩\u200d👧\u200d👦", "🏳️\u200d🌈 ❤️ ☺︎", "👍🏽", "🇩🇪🇫🇷", "1️⃣ #️⃣", "a😀b",
    # control characters and code points that are not characters
    "\x00", "a\x00b", "\x00\x07\x1b[31m", "\x7f\x80\x9f", "\ufeffthe", "the\u200bcat", "\u00ad soft\u00adhyphen", "\ufffd",
    "\ufffe\uffff", "\U0010ffff", "\ue000", "\U000e0041", "\u061c\u2066x\u2069", "\x85",
    # very long words, punctuation
    "a" * 99, "a" * 100, "a" * 101, "a" * 300, "xyzzy" * 40, "é" * 120, "猫" * 150, "!" * 200, "1" * 80, "a-" * 60, "\u0301" * 50,
    "Hello world!", "unable impossible cats", "don't we'll I'M o'clock", "1,000.50 €", "a@b.c http://x.y/z?a=1&b=2#c", "C:\\dir\\n",
    "(a) [b] {c} <d> &amp; \"e\" 'f' “g” ‘h’ «i»", "a…b – c — d‐e", "^_`~|$%*+=", "the…cat", "x₂ ≠ x² ∑ ∫ √", "foo_bar fooBar", "\\u0041",
]  # fmt: skip
assert len(set(HARD)) == len(HARD)

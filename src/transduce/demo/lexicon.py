"""The words of the built-in corpus, from `lexicon.txt`, as lexical categories of the grammar.

Genders are masc, fem, neut; cases nom, acc, dat, gen; numbers sg, pl; persons 1s, 2s (du), 3s, 1p, 3p.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files

from transduce.demo.grammar import Grammar, Rule, Symbol, Table, lexical_rule

CASES, GENDERS = ("nom", "acc", "dat", "gen"), ("masc", "fem", "neut")
PERSONS = ("1s", "2s", "3s", "1p", "3p")
COMPOUND_SHARE = 0.15
Leaves = Iterator[tuple[float, Rule | Symbol]]


def rows(section: str) -> list[list[str]]:
    """The rows of a section of the lexicon, without its name."""
    return _sections().get(section, [])


@cache
def _sections() -> dict[str, list[list[str]]]:
    found: dict[str, list[list[str]]] = {}
    for line in (files("transduce.demo") / "lexicon.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            section, *row = line.split()
            found.setdefault(section, []).append(row)
    return found


@cache
def grammar() -> Grammar:
    """The grammar with its lexicon."""
    lexical = (word, noun, adjective, article, verb, preposition, numeral, year)
    text = (files("transduce.demo") / "grammar.txt").read_text(encoding="utf-8")
    return Grammar(text, _tables(), {category.__name__: category for category in lexical})


def _tables() -> Mapping[str, Table]:
    """Tables for loops of the grammar: verbs of a frame, noun classes of a verb, genders of a class."""
    found: dict[str, dict[str, float]] = {}
    sizes: dict[str, float] = {}
    for kinds, _, _, gender, *_ in rows("noun"):
        for kind in kinds.split(","):
            genders = found.setdefault(f"genders.{kind}", {})
            genders[gender] = genders.get(gender, 0) + 1
            sizes[kind] = sizes.get(kind, 0) + 1
    for frame, *_ in rows("verb"):
        head, _, kinds = frame.partition(":")
        for name in ("prep",) if ">" in head else ("acc", "local") if head == "acc@" else (head,):
            group = found.setdefault(f"verbs.{name}", {})
            group[frame] = group.get(frame, 0) + 1
        found[f"preposition.{frame}"] = {head.removeprefix("self>"): 1}
        total = sum(sizes[kind] for kind in kinds.split(",") if kind)
        found[f"kinds.{frame}"] = {kind: sizes[kind] / total for kind in kinds.split(",") if kind}
    for name, *_, declension in rows("determiner"):
        found[f"declension.{name}"] = {declension: 1}
    return found


def ending(table: str, case: str, number: str, gender: str) -> str:
    """The ending of an article or adjective."""
    forms = next((row[2:] for row in rows("ending") if row[:2] == [table, case]), "----")
    return forms[GENDERS.index(gender) if number == "sg" else 3].replace("-", "")


def word(section: str) -> Leaves:
    """Words without inflection."""
    for en, de in rows(section):
        yield 1.0, lexical_rule(en.replace("_", " "), de.replace("_", " "), head=en)


def noun(case: str, number: str, kind: str, gender: str) -> Leaves:
    """Nouns, alone or as the head of a compound: garden + table = Gartentisch. Mass nouns have no plural."""
    modifiers = [(en, de) for en, de, kinds in rows("modifier") if kind in kinds.split(",")]
    for kinds, en, en_plural, own_gender, *singular, plural, dative_plural in rows("noun"):
        form, de = en, singular[CASES.index(case)]
        if number == "pl":
            form, de = en_plural, dative_plural if case == "dat" else plural
        if kind in kinds.split(",") and own_gender == gender and form != "-":
            yield 1 - COMPOUND_SHARE * bool(modifiers), lexical_rule(form, de, head=en)
            for first, first_de in modifiers:
                rule = lexical_rule(f"{first} {form}", first_de + de.lower(), head=en, met=(("compound", first, en),))
                yield COMPOUND_SHARE / len(modifiers), rule


def adjective(kind: str, declension: str, case: str, number: str, gender: str) -> Leaves:
    """Adjectives before a noun; after "is" the declension is "none" or "comparative"."""
    for en, de, stem, kinds, more, more_de in rows("adjective"):
        word_en = more.replace("_", " ") if declension == "comparative" else en
        if kind in kinds.split(",") and word_en != "-":
            form = {"none": de, "comparative": more_de}.get(declension, stem + ending(declension, case, number, gender))
            yield 1.0, lexical_rule(word_en, form, head=en)


def article(determiner: str, case: str, number: str, gender: str, kind: str) -> Leaves:
    """The beginning of a noun phrase: an article, possessive, quantifier, number, or a name in the genitive."""
    if determiner == "number" and number == "pl":
        yield 1.0, grammar().symbol("numeral", "999")
    elif determiner == "name" and kind != "person" and case != "gen":
        for en, de in (*rows("woman"), *rows("man")):
            yield 1.0, lexical_rule(f"{en}'s", f"{de}s")
    mass = all(row[2] == "-" for row in rows("noun") if kind in row[0].split(","))
    for name, *english, stem, table, _ in rows("determiner"):
        en = english[1 if number == "pl" else 2 if mass else 0].replace("_", " ").replace("0", "")
        if name == determiner and en != "-":
            de = stem.replace("_", " ") + ending(table, case, number, gender) if stem != "0" else ""
            yield 1.0, lexical_rule(en, de, head=name)


def verb(group: str, mood: str, person: str) -> Leaves:
    """Verbs of a group.

    English parts: auxiliary, main verb, particle. German parts: finite verb, end of a main clause, end of a
    subordinate clause, reflexive pronoun.
    """
    i, third = PERSONS.index(person), person == "3s"
    ((aux, before, form, german, kind),) = (row for name, *row in rows("mood") if name == mood)
    aux, before, german = ((x.split("/") * 5)[i] for x in (aux, before, german))
    for frame, base, present, past, done, particle, lexeme, present_de, past_de, done_de, perfect in rows("verb"):
        if frame != group or (mood == "past" and base == past and not third):
            continue  # "they read" is the present, so that every English sentence has one German translation
        prefix, _, infinitive = lexeme.rpartition("+")
        main = {"base": base, "pres": present if third else base, "past": past, "participle": done}[form]
        if kind == "finite":
            finite = (present_de if german == "pres" else past_de).split("/")[i]
            parts = [finite, prefix, prefix + finite]
        elif kind == "zu":
            parts = ["", *[f"{prefix}zu{infinitive}" if prefix else f"zu {infinitive}"] * 2]
        else:
            auxiliary = rows(f"perfect.{perfect}")[0][i] if kind == "participle" else german
            end = done_de if kind == "participle" else prefix + infinitive
            parts = [auxiliary, end, f"{end} {auxiliary}"]
        parts.append(rows("reflexive")[0][i] if frame.startswith("self>") else "")
        src = f"{aux} / {before} {main} / {particle}".replace("-", "").replace("_", " ")
        yield 1.0, lexical_rule(src, " / ".join(parts), head=lexeme)


def preposition(triple: str) -> Leaves:
    """A preposition given as English>German>case."""
    en, de, _ = triple.replace("-", "").replace("_", " ").split(">")
    yield 1.0, lexical_rule(en, de)


def numeral(largest: str) -> Leaves:
    """Numbers from two on, mostly small ones, for a plural: none ends in a bare "one"."""
    below = {int(n): (en, de) for n, en, de in rows("number")}
    for n in range(2, int(largest) + 1):
        hundreds, rest = divmod(n, 100)
        en, de = below.get(rest, ("", ""))
        if hundreds:
            en = f"{below[hundreds][0]} hundred{' and ' if rest else ''}{en}"
            de = f"{below[hundreds][1] if hundreds > 1 else 'ein'}hundert{de}"
        if rest != 1:
            weight = 0.45 / 11 if n <= 12 else 0.45 / 87 if n < 100 else 0.1 / 891
            yield weight, lexical_rule(en, de, head=str(n))


def year() -> Leaves:
    """Years: nineteen eighty-four, neunzehnhundertvierundachtzig."""
    numbers = rows("number")
    for _, century, century_de in numbers[16:19]:
        for _, en, de in numbers[9:]:
            yield 1.0, lexical_rule(f"{century} {en}", f"{century_de}hundert{de}")

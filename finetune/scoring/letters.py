"""The letters that an answer to a multiple-choice question chooses, in many languages.

Tried in this order:

- \\boxed{B};
- the last statement without a negation: "The answer is B", "B is right", "정답은 B입니다", a word and a colon;
- the first line: "B", "B - Paris", "B) Paris";
- a letter in brackets: "(B)".

A first line with only the letter wins, unless a later statement names the answer.
"""

from __future__ import annotations

from collections.abc import Iterable

import regex

from finetune.scoring.numerals import boxed, unified

MOST_SEARCHED = 20_000  # characters, from the start and the end
ALL = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
LEAST_LETTERS = "ABCDE"  # a question's letters, if no reference names a later one
# Stems of words, lower case. \b holds where a script has spaces.
_ANSWER = (
    r"answer|correct|right\b|solution|choos|chose|pick|select|go with|antwort|richtig|korrekt|lösung|wähle|répon|"
    r"reponse|bonne|juste|choisi|respuesta|correct[oa]|elijo|resposta|escolho|corret|certa\b|risposta|scelgo|giust|"
    r"ответ|правильн|верн|выбира|odpowied|poprawn|wybieram|antwoord|juist|答案|选择|選擇|应选|故选|选|選|正确|正確|答え|正解|"
    r"回答|正しい|정답|답은|답:|선택|맞|옳|cevap|cevab|doğru|إجابة|الجواب|صحيح|أختار|उत्तर|सही|คำตอบ|ตอบ|ถูก|đáp án|"
    r"chọn|đúng"
)
_OPTION = r"option|choice|wahl|choix|opci[oó]n|opção|opzione|вариант|seçenek|选项|選項|選択肢|보기|lựa chọn|optie"
_COPULA = (
    r"is|it's|that's|be|ist|wäre|est|c'est|serait|es|sería|é|è|sarà|это|jest|to|是|为|為|は|은|는|이|가|라|である|là|"
    r"say|hence|therefore|thus|so|daher|donc|所以|因此|따라서"
)
_NOT = (
    r"\bnot\b|n't\b|\bcannot\b|\bwrong|\bincorrect|\bfalse\b|\bno\b(?! doubt)|\bnever\b|\bneither\b|\bnor\b|"
    r"rule[sd]? out|eliminat|exclud|mistak|instead of|rather than|\bunlike|\bnicht|\bkein|\bfalsch|\binkorrekt|\bweder|"
    r"statt\b|\bpas\b|\bnon\b|\bfau[xs]|\bplutôt que|\bjamais|\bfals|errón|erróne|incorrect|tampoco|en lugar de|\bnão|"
    r"\berrad|incorret|\bnem\b|sbagliat|errat|scorrett|\bне\b|неверн|неправильн|ошибочн|\bnie\b|błędn|niepopraw|\bniet\b|"
    r"\bgeen\b|\bfout|onjuist|不|非|错|錯|誤|违|違|間違|ない|아니|아닙|틀|않|değil|yanlış|ليس|ليست|خطأ|خاطئ|नहीं|गलत|ไม่|ผิด|"
    r"không|\bsai\b"
)
_AND = r"(?:,|;|&|/|\+|、|\b(?:and|und|et|y|e|i|en|ve|и|và)\b|和|与|與|及|と|와|과|그리고|و)"
_OR = r"\b(?:or|oder|ou|o|или|lub|of|veya|hoặc)\b|或|또는|または|أو"
_VOWELS = "AEIOUY"  # these are words in many languages, so no lower-case word may follow
_CLAUSE = regex.compile(
    r"[.!?。！？؟।](?=\s|$|\p{Lo})|[;,\n]|\b(?:but|sondern|mais|sino|mas|pero|aber|но|а|lecz|ale|maar|utan|ama)\b"
    r"|而是|而|(?<=아니라)\s|(?<=ではなく)|\bبل\b|\b(?:because|weil|since|parce|car|porque|perché|потому|omdat)\b|因为|因為"
    r"|(?=\b(?:rather than|instead of|statt|plutôt que|en lugar de)\b)"
)


def allowed_letters(references: Iterable[str]) -> str:
    """A to the last letter that a reference names, and at least A to E."""
    named = {letter for reference in references for letter in chosen_letters(reference, ALL) or ()}
    return LEAST_LETTERS if not named else ALL[: max(ALL.index(max(named)) + 1, len(LEAST_LETTERS))]


def _tidy(text: str) -> str:
    """The text without Markdown, LaTeX, HTML and quotation marks."""
    text = regex.sub(r"\\(?:text|math)[a-z]*\s*\{([^{}]*)\}", r" \1 ", unified(text))
    text = regex.sub(
        r"\\boxed\s*|\\[a-zA-Z]+|</?[a-z][\w-]*>|[*_$\"{}“”«»„「」『』【】<>|\\]|(?<!\w)'|'(?!\w)", " ", text
    )
    return str(regex.sub(r"[^\S\n]+", " ", text)).strip()


def chosen_letters(text: str, letters: str) -> frozenset[str] | None:
    """The letters that an answer chooses, usually one; None without a choice, or for "A or B".

    Args:
        letters: The question's letters, from `allowed_letters`.
    """
    # A single letter: no word, no C++, no A', no B12.
    one = rf"(?<![\p{{Latin}}\p{{N}}'&+-])[(\[]?([{letters}])(?![\p{{Latin}}\p{{N}}+#&]|'(?![dt][ıiuü]r))[)\]]?"
    box = boxed(text)
    if box is not None:
        return _only(_tidy(box), letters)
    if len(text) > MOST_SEARCHED:  # a choice stands at the start or the end
        text = f"{text[: MOST_SEARCHED // 2]}\n{text[-MOST_SEARCHED // 2 :]}"
    text = _tidy(text)
    if (whole := _only(text, letters)) is not None:
        return whole
    lines = text.split("\n", 1)
    first = _only(regex.sub(rf"(?i)^\W*(?:\p{{L}}+ )?(?:{_OPTION}|{_ANSWER})\p{{L}}*\s*", "", lines[0]), letters)
    named, stated = None, None
    joined = regex.sub(
        rf"{one}(?:\s*{_AND}\s*{one})+(?=\s*(?:[.;:!?)\]\n]|$))|{one}(?:\s*,\s*{one})*\s*,?\s*(?!,){_AND}\s*{one}",
        lambda match: " " + "#".join(regex.findall(f"[{letters}](?![a-z])", match[0])) + " ",
        text,
    )
    token = (
        rf"(?<![\p{{Latin}}\p{{N}}'&+#-])[(\[]?"
        rf"(?P<set>[{letters}]{{1,5}}|[{letters}](?:#[{letters}])+)(?![\p{{Latin}}\p{{N}}+#&]|'(?![dt][ıiuü]r))[)\]]?"
    )
    for clause in regex.split(_CLAUSE, joined):
        if not clause or not regex.search(f"(?i)[{letters}]", clause):
            continue
        found = [
            match
            for match in regex.finditer(token, clause)
            if list(match["set"]) == sorted({*match["set"]}) or "#" in match["set"]
        ]
        found = [
            match
            for match in found
            if not (match["set"] in _VOWELS and regex.match(r" \p{Ll}", clause[match.end() :]))
            or regex.match(r" (?:is|was|ist|est|es|because|since|weil|è)\b", clause[match.end() :])
        ]
        small = regex.search(rf"(?i)(?::|=|\b(?:{_COPULA}))\s*[(\[]?(?P<set>[{letters}])[)\]]?\W*$", clause)
        if not found and small is not None and regex.search(rf"(?i){_ANSWER}|{_OPTION}", clause[: small.start("set")]):
            found = [small]
        if not found or regex.search(f"(?i){_NOT}", clause):
            continue
        sets = {match["set"].upper() for match in found}
        if len(sets) > 1:
            if regex.search(rf"(?i){_ANSWER}|:", clause[: found[0].start()]):
                stated = None if regex.search(_OR, clause) else frozenset("".join(sets))
            continue
        match = found[-1]
        chosen = frozenset(match["set"].upper().replace("#", ""))
        before, after = clause[: match.start()], clause[match.end() :]
        if regex.search(rf"(?i){_ANSWER}|(?:{_OPTION})\p{{L}}*\s*(?:{_COPULA}|[:=])", before):
            named = stated = chosen
        elif (
            regex.search(
                rf"(?i)[\p{{L}}\p{{M}}]\s*[:：=→]\s*$|(?:^|\s|\b)(?:{_COPULA})(?: (?:la|a|le|die|the|option))?\s*$",
                before,
            )
            or regex.search(
                rf"(?i)^\W*(?:\p{{L}}+\W+){{0,4}}?(?:{_ANSWER})|^\W{{0,2}}(?:{_ANSWER}|입니다|이다|예요|です|だ)", after
            )
            or not regex.search(r"\p{L}", before + after)
        ):
            stated = chosen
    if first is not None:
        return named or first
    if stated is not None:
        return stated
    lead = regex.match(
        rf"\W*{one}(?P<mark>\s*[):.,\]]|\s+[-/]+\s|\s*$|(?=[\p{{Lo}}])|\s+(?=\p{{L}}))(?P<rest>.*)", lines[0]
    )
    if lead is not None and not regex.search(f"(?i){_NOT}", regex.split(_CLAUSE, lead["rest"])[0] or ""):
        word = not lead["mark"].strip() and regex.match(r"\s*\p{Ll}", lead["rest"])
        if not (word and lead[1] in _VOWELS) and not regex.match(
            rf"\s*(?:{_OR})\s*{one}|\s*{_AND}\s*{one}", lead["rest"]
        ):
            return frozenset(lead[1])
    small = regex.match(rf"(?i)\W*([{letters}])\s*[).:\]]\s", lines[0] + " ")
    if small is not None:
        return frozenset(small[1].upper())
    marked = {
        match[1]
        for match in regex.finditer(rf"[(\[]([{letters}])[)\]]|(?<!\p{{L}})([{letters}])\)", joined)
        if match[1]
    }
    return frozenset(marked) if len(marked) == 1 and not regex.search(f"(?i){_NOT}", joined) else None


def _only(text: str, letters: str) -> frozenset[str] | None:
    """The letters of a text without anything else: B, (b), "A, C", ABD."""
    text = regex.sub(r"^[\s(\[.:]+|[\s)\].:,!]+$", "", text)
    if regex.fullmatch(f"(?i)[{letters}]", text):
        return frozenset(text.upper())
    if regex.fullmatch(f"[{letters}]{{2,}}", text):
        return frozenset(text) if list(text) == sorted(set(text)) else None
    if regex.fullmatch(
        rf"[(\[]?[{letters}][)\]]?(?:\s*{_AND}{{1,2}}\s*[(\[]?[{letters}][)\]]?)+", text.replace(", and", ",")
    ):
        return frozenset(regex.findall(rf"(?<!\p{{Latin}})[{letters}](?!\p{{Latin}})", text))
    return None

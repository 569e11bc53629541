"""The letters that an answer to a multiple-choice question chooses, in many languages.

In order: \\boxed{B}; a statement ("The answer is B", "B is right", "정답은 B입니다", any word before a colon), the last
one that is not negated; the first line ("B", "B - Paris", "B) Paris"); a marked letter ("(B)"). A first line with
nothing but the letter gives way only to a later statement that names the answer.
"""

from __future__ import annotations

from collections.abc import Iterable

import regex

from finetune.scoring.numerals import boxed, unified

MOST_SEARCHED = 20_000  # of a text that is searched
ALL = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
LEAST_LETTERS = "ABCDE"  # what a question offers, where the references show no later letter
# Stems of words, lower case. \b holds where a script has spaces.
_ANSWER = (
    r"answer|correct|right\b|solution|choos|chose|pick|select|go with|"  # English
    r"antwort|richtig|korrekt|lösung|wähle|"  # German
    r"répon|reponse|bonne|juste|choisi|respuesta|correct[oa]|elijo|resposta|escolho|corret|"
    r"certa\b|risposta|scelgo|giust|"
    r"ответ|правильн|верн|выбира|відповідь|odpowied|poprawn|wybieram|odpověď|správn|antwoord|"
    r"juist|svar\b|svaret|rätt|riktig|"
    r"答案|选择|選擇|应选|故选|选|選|正确|正確|答え|正解|回答|正しい|정답|답은|답:|선택|맞|옳|cevap|cevab|doğru|"
    r"إجابة|الجواب|صحيح|أختار|תשוב|נכונ|उत्तर|सही|คำตอบ|ตอบ|ถูก|đáp án|chọn|đúng|jawab|benar|"
    r"vastaus|válasz|helyes|răspuns|απάντηση|σωστ"
)  # fmt: skip
_OPTION = (
    r"option|choice|wahl|choix|opci[oó]n|opção|opzione|вариант|variant|seçenek|选项|選項|選択肢|보기|"
    r"lựa chọn|pilihan|optie|alternativ"
)
_COPULA = (
    r"is|it's|that's|be|leaves|leaving|ist|bleibt|wäre|est|c'est|reste|serait|es|queda|sería|é|è|sarà|это|jest|är|er|on|to|是|为|為|"
    r"は|은|는|이|가|라|である|là|adalah|είναι|say|hence|therefore|thus|so|daher|donc|所以|因此|따라서"
)
_NOT = (
    r"\bnot\b|n't\b|\bcannot\b|\bwrong|\bincorrect|\bfalse\b|\bno\b(?! doubt)|\bnever\b|\bneither\b|"
    r"\bnor\b|rule[sd]? out|eliminat|exclud|mistak|"
    r"instead of|rather than|\bunlike|\bnicht|\bkein|\bfalsch|\binkorrekt|\bweder|statt\b|"
    r"\bpas\b|\bnon\b|\bfau[xs]|\bplutôt que|\bjamais|"
    r"\bfals|errón|erróne|incorrect|tampoco|en lugar de|\bnão|\berrad|incorret|\bnem\b|sbagliat|errat|scorrett|"
    r"\bне\b|неверн|неправильн|ошибочн|\bнеправ|\bnie\b|błędn|niepopraw|\bniet\b|\bgeen\b|"
    r"\bfout|onjuist|\binte\b|\bikke\b|\bfel\b|\bfeil\b|"
    r"不|非|错|錯|誤|违|違|間違|ない|아니|아닙|틀|않|değil|yanlış|ليس|ليست|خطأ|خاطئ|לא |שגוי|नहीं|गलत|ไม่|ผิด|"
    r"không|\bsai\b|bukan|salah|\bnu\b|\bnem\b|rossz|väärä|δεν|λάθος"
)  # fmt: skip
_AND = r"(?:,|;|&|/|\+|、|\b(?:and|und|et|y|e|i|en|och|og|ve|и|dan|và)\b|和|与|與|及|と|와|과|그리고|و)"
_OR = r"\b(?:or|oder|ou|o|или|lub|of|eller|veya|atau|hoặc)\b|或|또는|または|أو"
_VOWELS = "AEIOUY"  # words of their own in many languages, so a word in small letters may not follow
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
    """Without marks of Markdown, LaTeX, HTML and quoting."""
    text = regex.sub(r"\\(?:text|math)[a-z]*\s*\{([^{}]*)\}", r" \1 ", unified(text))
    text = regex.sub(
        r"\\boxed\s*|\\[a-zA-Z]+|</?[a-z][\w-]*>|[*_$\"{}“”«»„「」『』【】<>|\\]|(?<!\w)'|'(?!\w)", " ", text
    )
    return str(regex.sub(r"[^\S\n]+", " ", text)).strip()


def chosen_letters(text: str, letters: str) -> frozenset[str] | None:
    """The letters that an answer chooses, most often one; None if it chooses none, or "A or B".

    Args:
        letters: Those that can be chosen, as `allowed_letters` finds them.
    """
    # A letter alone: no word, no C++, no A', no B12. Two that increase are a set only where they stand alone.
    one = rf"(?<![\p{{Latin}}\p{{N}}'&+-])[(\[]?([{letters}])(?![\p{{Latin}}\p{{N}}+#&]|'(?![dt][ıiuü]r))[)\]]?"
    box = boxed(text)
    if box:
        # A box that holds more than letters may be a formula, so words outside it come first.
        chosen = _only(_tidy(box), letters)
        return (
            chosen
            or chosen_letters(text.replace(box, "").replace("\\boxed", ""), letters)
            or chosen_letters(box, letters)
        )
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
    """The letters of a text that holds nothing else: B, (b), "A, C", ABD."""
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

"""Tables in forty code pages and languages: each is read right, or a question shows the right reading."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finetune.data.check import check_rows
from finetune.data.dialect import csv_dialect
from finetune.data.readers import read_rows
from finetune.errors import DataError, UnclearEncoding
from finetune.new_recipe import propose
from finetune.recipe.schema import Data

# Four questions and answers in each language, and the code pages that programs of its countries write.
TABLES: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "de": (
        "cp1252 cp850 mac_roman",
        [
            ("Wo liegt Köln?", "Köln liegt am Rhein, südlich von Düsseldorf."),
            ("Wie heiß wird der Ofen?", "Er erreicht höchstens 300 Grad."),
            ("Darf ich früher kündigen?", "Ja, mit einer Frist von vier Wochen."),
            ("Was heißt das?", "Das heißt Größe."),
        ],
    ),
    "fr": (
        "cp1252 cp437 mac_roman iso8859_15",
        [
            ("Où est la bibliothèque ?", "Elle est derrière la mairie, à gauche du théâtre."),
            ("Ça coûte combien ?", "L'entrée est gratuite pour les élèves."),
            ("Peut-on réserver ?", "Oui, par téléphone ou sur place."),
            ("Y a-t-il un vélo à louer ?", "Malheureusement, tout est déjà loué."),
        ],
    ),
    "es": (
        "cp1252 cp850",
        [
            ("¿Dónde está la estación?", "Está detrás del mercado, junto a la plaza."),
            ("¿Cuántos años tiene el niño?", "Tiene cinco años y va al colegio."),
            ("¿A qué hora abre el museo?", "Abre a las diez de la mañana."),
            ("¿Puedo pagar mañana?", "Sí, también puede pagar después."),
        ],
    ),
    "pt": (
        "cp1252",
        [
            ("Onde fica a estação?", "Fica atrás do mercado, ao lado da praça."),
            ("Quantos pães há?", "Há três pães e uma maçã."),
            ("As lições são difíceis?", "Não são, mas exigem atenção."),
            ("Você vem amanhã?", "Sim, às nove da manhã."),
        ],
    ),
    "it": (
        "cp1252 mac_roman",
        [
            ("Perché è chiuso?", "Perché oggi è lunedì e la città riposa."),
            ("Quanto costa il caffè?", "Il caffè costa un euro e venti."),
            ("C'è già la libertà di scelta?", "Sì, ma non è così facile."),
            ("Che cos'è la felicità?", "È una domanda più grande."),
        ],
    ),
    "sv": (
        "cp1252 cp850",
        [
            ("Var ligger sjön?", "Sjön ligger norr om Växjö."),
            ("När öppnar affären?", "Affären öppnar klockan åtta på lördagar."),
            ("Får jag ta med hunden?", "Nej, tyvärr är djur förbjudna."),
            ("Hur mår du?", "Jag mår bra, tack så mycket."),
        ],
    ),
    "da": (
        "cp1252 cp865",
        [
            ("Hvor ligger øen?", "Øen ligger syd for Ærø."),
            ("Hvornår åbner butikken?", "Butikken åbner klokken otte om lørdagen."),
            ("Må jeg tage hunden med?", "Nej, dyr er desværre forbudt."),
            (
                "Hvad hedder fjorden på kortet?",
                "Den hedder Mariager Fjord, og den er lang, smal og meget rolig, så børn kan også sejle der.",
            ),
        ],
    ),
    "is": (
        "cp1252",
        [
            ("Hvar er bókasafnið?", "Það er við hliðina á sundlauginni."),
            ("Hvað kostar miðinn?", "Miðinn kostar þúsund krónur."),
            ("Hvenær opnar búðin?", "Búðin opnar klukkan níu á morgnana."),
            ("Má ég borða hér?", "Já, það er í lagi að borða hér."),
        ],
    ),
    "tr": (
        "cp1254 cp857",
        [
            ("Otobüs ne zaman gelir?", "Otobüs her yarım saatte bir gelir."),
            ("Müze pazar günü açık mı?", "Hayır, müze pazar günü kapalıdır."),
            ("Bu iş için kaç kişi gerekir?", "Beş kişi gerekir, altıncısı yardım eder."),
            ("Şehirde ağaç var mı?", "Evet, sokaklarda çok sayıda ağaç vardır."),
        ],
    ),
    "pl": (
        "cp1250 cp852 iso8859_2",
        [
            ("Gdzie jest biblioteka?", "Biblioteka znajduje się za ratuszem, obok teatru."),
            ("Ile lat ma to dziecko?", "Dziecko ma pięć lat i chodzi do przedszkola."),
            ("Czy muzeum jest dziś otwarte?", "Nie, w poniedziałki muzeum jest zamknięte."),
            ("Co słychać?", "Wszystko w porządku, dziękuję."),
        ],
    ),
    "cs": (
        "cp1250 cp852 mac_latin2",
        [
            ("Kde je knihovna?", "Knihovna je za radnicí, vedle divadla."),
            ("Kdy přijede vlak?", "Vlak přijede za půl hodiny na třetí nástupiště."),
            ("Můžu zaplatit kartou?", "Bohužel, bereme pouze hotovost."),
            ("Je tu něco k jídlu?", "Ano, výborné žemle a čerstvé ovoce."),
        ],
    ),
    "hu": (
        "cp1250 cp852",
        [
            ("Hol van a könyvtár?", "A könyvtár a városháza mögött található."),
            ("Mikor érkezik a vonat?", "A vonat fél óra múlva érkezik a hűvösvölgyi megállóba."),
            ("Fizethetek kártyával?", "Sajnos csak készpénzt fogadunk el."),
            ("Milyen idő lesz holnap?", "Holnap esős, szeles idő várható, délután erős zivatar."),
        ],
    ),
    "ro": (
        "cp1250",
        [
            ("Unde este biblioteca?", "Biblioteca se află în spatele primăriei, lângă teatru."),
            ("Când soseşte trenul?", "Trenul soseşte peste o jumătate de oră la linia a treia."),
            ("Pot să plătesc cu cardul?", "Din păcate, acceptăm numai numerar."),
            ("Cât face totul?", "Totul face cincizeci de lei, mulţumesc."),
        ],
    ),
    "hr": (
        "cp1250",
        [
            ("Gdje je knjižnica?", "Knjižnica je iza gradske vijećnice, pokraj kazališta."),
            ("Kada stiže vlak?", "Vlak stiže za pola sata na treći kolosijek."),
            ("Mogu li platiti karticom?", "Nažalost, primamo samo gotovinu."),
            ("Što ima za jesti?", "Imamo svježe voće, čorbu i kolače."),
        ],
    ),
    "sl": (
        "cp1250",
        [
            ("Kje je knjižnica?", "Knjižnica je za mestno hišo, poleg gledališča."),
            ("Kdaj pride vlak?", "Vlak pride čez pol ure na tretji peron."),
            ("Ali lahko plačam s kartico?", "Žal sprejemamo samo gotovino."),
            ("Kaj je za večerjo?", "Za večerjo je juha in svež kruh."),
        ],
    ),
    "lt": (
        "cp1257 cp775",
        [
            ("Kur yra biblioteka?", "Biblioteka yra už rotušės, šalia teatro."),
            ("Kada atvyks traukinys?", "Traukinys atvyks po pusvalandžio į trečią kelią."),
            ("Ar galiu mokėti kortele?", "Deja, priimame tik grynuosius pinigus."),
            ("Koks oras bus rytoj?", "Rytoj numatomas lietus, žemė bus šlapia."),
        ],
    ),
    "lv": (
        "cp1257",
        [
            ("Kur ir bibliotēka?", "Bibliotēka atrodas aiz rātsnama, blakus teātrim."),
            ("Kad pienāks vilciens?", "Vilciens pienāks pēc pusstundas trešajā ceļā."),
            ("Vai varu maksāt ar karti?", "Diemžēl pieņemam tikai skaidru naudu."),
            ("Kāds laiks būs rīt?", "Rīt gaidāms lietus un stiprs vējš."),
        ],
    ),
    "et": (
        "cp1257",
        [
            ("Kus asub raamatukogu?", "Raamatukogu asub raekoja taga, teatri kõrval."),
            ("Millal rong jõuab?", "Rong jõuab poole tunni pärast kolmandale teele."),
            ("Kas võin maksta kaardiga?", "Kahjuks võtame vastu ainult sularaha."),
            ("Milline ilm homme tuleb?", "Homme sajab vihma ja on külm öö."),
        ],
    ),
    "ru": (
        "cp1251 cp866 koi8_r mac_cyrillic iso8859_5",
        [
            ("Где находится библиотека?", "Библиотека находится за ратушей, рядом с театром."),
            ("Когда прибудет поезд?", "Поезд прибудет через полчаса на третий путь."),
            ("Можно заплатить картой?", "К сожалению, мы принимаем только наличные."),
            ("Какая завтра погода?", "Завтра ожидается дождь и сильный ветер."),
        ],
    ),
    "uk": (
        "cp1251 koi8_u",
        [
            ("Де знаходиться бібліотека?", "Бібліотека розташована за ратушею, поруч із театром."),
            ("Коли прибуде поїзд?", "Поїзд прибуде за півгодини на третю колію."),
            ("Чи можна заплатити карткою?", "На жаль, ми приймаємо лише готівку."),
            ("Яка завтра погода?", "Завтра очікується дощ і сильний вітер."),
        ],
    ),
    "bg": (
        "cp1251 cp855",
        [
            ("Къде е библиотеката?", "Библиотеката е зад кметството, до театъра."),
            ("Кога пристига влакът?", "Влакът пристига след половин час на трети коловоз."),
            ("Мога ли да платя с карта?", "За съжаление приемаме само пари в брой."),
            ("Какво ще бъде времето утре?", "Утре се очаква дъжд и силен вятър."),
        ],
    ),
    "el": (
        "cp1253 cp737",
        [
            ("Πού βρίσκεται η βιβλιοθήκη", "Η βιβλιοθήκη βρίσκεται πίσω από το δημαρχείο."),
            ("Πότε φτάνει το τρένο", "Το τρένο φτάνει σε μισή ώρα."),
            ("Μπορώ να πληρώσω με κάρτα", "Δυστυχώς δεχόμαστε μόνο μετρητά."),
            ("Τι καιρό θα κάνει αύριο", "Αύριο αναμένεται βροχή και δυνατός άνεμος."),
        ],
    ),
    "ar": (
        "cp1256",
        [
            ("أين تقع المكتبة؟", "تقع المكتبة خلف مبنى البلدية بجانب المسرح."),
            ("متى يصل القطار؟", "يصل القطار بعد نصف ساعة إلى الرصيف الثالث."),
            ("هل يمكنني الدفع بالبطاقة؟", "للأسف نقبل النقد فقط."),
            ("كيف سيكون الطقس غدا؟", "من المتوقع هطول أمطار ورياح قوية."),
        ],
    ),
    "fa": (
        "cp1256",
        [
            ("كتابخانه كجاست؟", "كتابخانه پشت شهرداري و كنار تئاتر است."),
            ("قطار چه زماني مي\u200cرسد؟", "قطار نيم ساعت ديگر به سكوي سوم مي\u200cرسد."),
            ("مي\u200cتوانم با كارت پرداخت كنم؟", "متأسفانه فقط پول نقد مي\u200cپذيريم."),
            ("هواي فردا چگونه است؟", "فردا باران و باد شديد پيش\u200cبيني مي\u200cشود."),
        ],
    ),
    "he": (
        "cp1255 cp862",
        [
            ("איפה נמצאת הספרייה?", "הספרייה נמצאת מאחורי בית העירייה ליד התיאטרון."),
            ("מתי מגיעה הרכבת?", "הרכבת מגיעה בעוד חצי שעה לרציף השלישי."),
            ("אפשר לשלם בכרטיס?", "לצערנו אנחנו מקבלים רק מזומן."),
            ("מה יהיה מזג האוויר מחר?", "מחר צפויים גשם ורוח חזקה."),
        ],
    ),
    "th": (
        "cp874",
        [
            ("ห้องสมุดอยู่ที่ไหน", "ห้องสมุดอยู่หลังศาลากลางข้างโรงละคร"),
            ("รถไฟจะมาถึงเมื่อไร", "รถไฟจะมาถึงในอีกครึ่งชั่วโมงที่ชานชาลาสาม"),
            ("จ่ายด้วยบัตรได้ไหม", "ขออภัย เรารับเฉพาะเงินสด"),
            ("พรุ่งนี้อากาศเป็นอย่างไร", "พรุ่งนี้จะมีฝนและลมแรง"),
        ],
    ),
    "ja": (
        "shift_jis euc_jp iso2022_jp",
        [
            ("図書館はどこにありますか？", "図書館は市役所の裏、劇場の隣にあります。"),
            ("電車はいつ着きますか？", "電車は三十分後に三番線に着きます。"),
            ("カードで払えますか？", "申し訳ありませんが、現金のみです。"),
            ("明日の天気はどうですか？", "明日は雨と強い風が予想されます。"),
        ],
    ),
    "ko": (
        "cp949",
        [
            ("도서관은 어디에 있습니까?", "도서관은 시청 뒤 극장 옆에 있습니다."),
            ("기차는 언제 도착합니까?", "기차는 삼십 분 뒤에 삼 번 승강장에 도착합니다."),
            ("카드로 낼 수 있습니까?", "죄송하지만 현금만 받습니다."),
            ("내일 날씨는 어떻습니까?", "내일은 비와 강한 바람이 예상됩니다."),
        ],
    ),
    "zh": (
        "gb18030",
        [
            ("图书馆在哪里？", "图书馆在市政厅后面，剧院旁边。"),
            ("火车什么时候到？", "火车半小时后到达三号站台。"),
            ("可以刷卡吗？", "抱歉，我们只收现金。"),
            ("明天天气怎么样？", "明天预计有雨和大风。"),
        ],
    ),
    "zht": (
        "big5",
        [
            ("圖書館在哪裡？", "圖書館在市政廳後面，劇院旁邊。"),
            ("火車什麼時候到？", "火車半小時後到達三號月臺。"),
            ("可以刷卡嗎？", "抱歉，我們只收現金。"),
            ("明天天氣怎麼樣？", "明天預計有雨和大風。"),
        ],
    ),
    "sq": (
        "cp1252",
        [
            ("Ku ndodhet biblioteka?", "Biblioteka ndodhet pas bashkisë, pranë teatrit."),
            ("Kur vjen treni?", "Treni vjen pas gjysmë ore në shinën e tretë."),
            ("A mund të paguaj me kartë?", "Fatkeqësisht pranojmë vetëm para në dorë."),
            ("Çfarë moti do të bëjë nesër?", "Nesër pritet shi dhe erë e fortë."),
        ],
    ),
}
PAIRS = [(language, page) for language, (pages, _) in TABLES.items() for page in pages.split()]
FEW = [("tr", "cp1254"), ("fr", "mac_roman"), ("ru", "koi8_r"), ("ja", "euc_jp"), ("sq", "cp1252")]
SILENT = [(language, page) for language, page in PAIRS if page == "cp1252" and language != "sq"]


def written(language: str, page: str, folder: Path) -> Path:
    rows = "".join(f"{question};{answer}\n" for question, answer in TABLES[language][1])
    (file := folder / f"{language}_{page}.csv").write_bytes(f"question;answer\n{rows}".encode(page))
    return file


def outcome(language: str, page: str, folder: Path) -> str:
    """right, asked (with the right reading among the answers), or wrong: by the text that was encoded."""
    file = written(language, page, folder)
    try:
        readings = [(csv_dialect(file).encoding, "")]
    except UnclearEncoding as error:
        readings = list(error.readings)
    encodings = [name for name, _ in readings]
    assert len({word for _, word in readings}) == len(readings)  # the words show the difference
    for encoding in encodings:
        rows = [row.values for row in read_rows(file, "csv", encoding=encoding)]
        if rows == [{"question": question, "answer": answer} for question, answer in TABLES[language][1]]:
            return "right" if len(encodings) == 1 else "asked"
    return "wrong"


@pytest.mark.parametrize(("language", "page"), FEW)
def test_a_code_page_is_right_or_asked(language: str, page: str, tmp_path: Path) -> None:
    assert outcome(language, page, tmp_path) in ("right", "asked")


@pytest.mark.slow
def test_no_code_page_is_guessed_wrongly(tmp_path: Path) -> None:
    outcomes = {pair: outcome(*pair, tmp_path) for pair in PAIRS}
    assert len(outcomes) >= 40
    assert [pair for pair, found in outcomes.items() if found == "wrong"] == []
    assert {outcomes[pair] for pair in SILENT} == {"right"}
    assert sum(found == "asked" for found in outcomes.values()) <= 6, outcomes


def test_two_plausible_readings_are_refused_by_check_and_asked_by_init(tmp_path: Path) -> None:
    file = written("sq", "cp1252", tmp_path)
    with pytest.raises(DataError) as raised:
        check_rows(Data.model_validate({"train": [{"path": "csv", "data_files": str(file)}]}))
    (line,) = raised.value.mistakes
    assert line.startswith(f"{file}:1: is not UTF-8, and may say 'bashkisė' (cp1257) or 'bashkisë' (cp1252)")
    with pytest.raises(UnclearEncoding):
        propose(str(file))
    asked: list[list[str]] = []

    def choose(lines: list[str]) -> int:
        asked.append(list(lines))
        return next(place for place, each in enumerate(lines) if "cp1252" in each)

    proposal = propose(str(file), choose=choose)  # type: ignore[arg-type]
    assert len(asked) == 1
    assert proposal.entry.encoding == "cp1252"
    assert "encoding: cp1252" in proposal.text
    assert propose(str(file), encoding="cp1252").entry.encoding == "cp1252"


ODD = {
    "curly quotes": ("question,answer\nWho?,“Me” – it’s fine…\nWhy?,No\n", "cp1252", "cp1252"),
    "degrees": ("question,answer\nHow warm?,20 °C ±2\n", "cp1252", "cp1252"),
    "one name": ("question,answer\nWho?,José\nWhy?,No\n", "cp1252", "cp1252"),
    "UTF-16 without a mark": ("question,answer\nWho?,José\n", "utf-16-le", "utf-16-le"),
    "UTF-16, big end first": ("質問,答\n何?,図書館\n", "utf-16-be", "utf-16-be"),
    "UTF-32": ("question,answer\nWho?,José\n", "utf-32", "utf-32"),
    "ISO-2022-JP": ("question,answer\n何?,図書館\n", "iso2022_jp", "iso2022_jp"),
}


@pytest.mark.parametrize("name", ODD)
def test_texts_that_need_no_question(name: str, tmp_path: Path) -> None:
    text, page, found = ODD[name]
    (file := tmp_path / "a.csv").write_bytes(text.encode(page))
    assert csv_dialect(file).encoding == found
    header, *rows = [line.split(",") for line in text.splitlines()]
    assert [row.values for row in read_rows(file, "csv")] == [dict(zip(header, row, strict=True)) for row in rows]


def test_a_letter_across_the_edge_of_two_chunks_is_utf8(tmp_path: Path) -> None:
    for edge in (2**18, 2**20, 2**21):  # the head, a chunk, and a chunk with the rest of its line
        (file := tmp_path / f"{edge}.csv").write_bytes(b"text\n" + b"a" * (edge - 6) + "ä\n".encode())
        assert file.read_bytes()[edge - 1 : edge + 1] == "ä".encode()
        assert csv_dialect(file).encoding == "utf-8"
        assert [str(row.values)[-3] for row in read_rows(file, "csv")] == ["ä"]


def test_a_late_row_counts(tmp_path: Path) -> None:
    """The sample holds every byte value of the file: here the Polish letters stand in the last line alone."""
    rows = "Where is it?;In the big house near the river\n" * 30_000
    (file := tmp_path / "a.csv").write_bytes(
        f"question;answer\nWho?;José\n{rows}Ile to kosztuje?;Pięćdziesiąt złotych, również w święta.\n".encode("cp1250")
    )
    assert csv_dialect(file).encoding == "cp1250"


def read_twice(text: str) -> str:
    """UTF-8 that was read as cp1252; the five bytes without a letter stay as control characters."""
    letters = (bytes([each]).decode("cp1252", "ignore") or chr(each) for each in text.encode("utf-8"))
    return "".join(letters)


@pytest.mark.parametrize(
    "text",
    [
        "München",
        "it’s “so”",
        "Привет",
        "café",
        "北京是首都",
        "日本語です",
        "서울",
        "Ελλάδα",
        "ไทย",
        "שלום",
        "مرحبا",
        "½",
        "🙂 ok",
    ],
)
def test_utf8_of_utf8_is_a_note(tmp_path: Path, text: str) -> None:
    for written, count in ((text, 0), (read_twice(text), 1)):
        file = tmp_path / "rows.jsonl"
        rows = [{"instruction": "Which one?", "output": each} for each in ("plain", written, "CAFÉ–BAR", "l’été…»")]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        notes: list[str] = []
        check_rows(Data.model_validate({"train": [{"path": str(file)}]}), notes.append)
        found = [note for note in notes if "a program read UTF-8 as cp1252" in note]
        assert len(found) == count
        assert all(": 1; if so, " in note for note in found)

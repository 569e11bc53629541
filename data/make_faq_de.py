"""Rebuild faq_de.csv, byte for byte: python data/make_faq_de.py

Questions to a tool rental that does not exist, in German, as a spreadsheet program in Germany saves them: semicolons,
cp1252, quotes around texts with line breaks. It has what such tables have: umlauts, empty cells, rows entered twice.
Standard library only. Everything here was written for this project, CC0-1.0.
"""

from __future__ import annotations

import csv
import random
from pathlib import Path

SEED = 7
ROWS, EMPTY, DUPLICATES = 300, 9, 11
# Article, name, euros a day, deposit in euros, kilograms, what it is for.
TOOLS = """
die|Bohrmaschine|12|50|3|Löcher in Holz und Mauerwerk
der|Bohrhammer|19|80|7|Löcher in Beton
der|Winkelschleifer|11|50|4|Schnitte in Metall und Stein
die|Stichsäge|9|40|3|Kurven in Holzplatten
die|Tischkreissäge|28|150|32|gerade Schnitte in Bretter
der|Hochdruckreiniger|24|100|21|schmutzige Höfe und Fassaden
der|Laubbläser|15|60|5|Blätter auf großen Flächen
der|Rasentrimmer|13|60|4|hohes Gras an Zäunen
die|Heckenschere|14|60|4|Hecken bis zwei Meter
der|Häcksler|35|200|48|Äste bis vier Zentimeter
die|Rüttelplatte|55|300|90|Kies unter Pflastersteinen
der|Betonmischer|30|150|56|Mörtel und Beton
die|Leiter|8|30|14|Arbeiten bis fünf Meter Höhe
das|Gerüst|60|300|180|ganze Hauswände
der|Teppichreiniger|22|100|12|Teppiche und Polster
der|Bautrockner|26|150|38|feuchte Wände nach einem Wasserschaden
die|Fliesenschneidmaschine|25|120|28|Fliesen bis sechzig Zentimeter
der|Farbsprüher|18|80|6|Zäune und große Wände
die|Motorsäge|29|200|6|Brennholz und gefällte Bäume
die|Schubkarre|6|20|11|Erde, Sand und Steine
der|Erdbohrer|33|150|17|Löcher für Zaunpfähle
das|Schweißgerät|36|250|19|Stahl bis acht Millimeter
der|Stromerzeuger|40|250|45|Strom, wo keine Steckdose ist
die|Tauchpumpe|17|80|9|Wasser aus Kellern
der|Bandschleifer|12|50|5|alte Farbe auf Türen
""".split("\n")[1:-1]


def questions(rng: random.Random) -> list[tuple[str, str, str]]:
    """(category, question, answer), each question once."""
    rows = []
    for line in TOOLS:
        article, name, day, deposit, weight, use = line.split("|")
        the, begins = f"{article} {name}", f"{article.capitalize()} {name}"
        accusative = f"{'den' if article == 'der' else article} {name}"
        weekend = round(float(day) * 1.5)
        alone = "Eine Person kann das Gerät allein tragen." if int(weight) < 20 else "Bitte kommen Sie zu zweit."
        rows += [
            ("Preise", f"Was kostet {the} am Tag?",
             f"{begins} kostet {day} Euro am Tag. Das Pfand beträgt {deposit} €."),
            ("Preise", f"Wie teuer ist {the} für ein Wochenende?",
             f"{begins} kostet für ein Wochenende {weekend} Euro, von Freitag 16 Uhr bis Montag 9 Uhr."),
            ("Preise", f"Wie hoch ist das Pfand für {accusative}?",
             f"Das Pfand beträgt {deposit} €. Sie erhalten es bei der Rückgabe sofort zurück."),
            ("Preise", f"Gibt es Rabatt, wenn ich {accusative} eine Woche brauche?",
             f"Ja. Für sieben Tage zahlen Sie nur fünf: {5 * int(day)} Euro für {accusative}."),
            ("Technik", f"Wofür ist {the} geeignet?", f"{begins} ist geeignet für {use}. Eine Anleitung liegt bei."),
            ("Technik", f"Wie schwer ist {the}?", f"{begins} wiegt {weight} Kilogramm. {alone}"),
            ("Technik", f"Brauche ich für {accusative} einen Führerschein oder einen Schein?",
             "Ja, wir brauchen Ihren Sägeschein." if name == "Motorsäge" else
             "Nein. Wir zeigen Ihnen die Bedienung in fünf Minuten."),
            ("Ausleihe", f"Kann ich {accusative} reservieren?",
             f"Ja. Rufen Sie uns an oder schreiben Sie eine E-Mail. Wir halten {accusative} bis 10 Uhr bereit."),
            ("Ausleihe", f"Liefern Sie {accusative} auch nach Hause?",
             f"Ja. Die Lieferung kostet {'25' if int(weight) >= 20 else '12'} Euro im Umkreis von zehn Kilometern."),
            ("Ausleihe", f"Wie lange darf ich {accusative} behalten?",
             f"Sie dürfen {accusative} bis zu vierzehn Tage behalten. Danach verlängern Sie am Telefon."),
            ("Schäden", f"Was passiert, wenn {the} kaputtgeht?",
             "Rufen Sie uns bitte sofort an.\nNormale Abnutzung zahlen wir, grobe Schäden zahlt Ihre "
             "Haftpflichtversicherung."),
            ("Schäden", f"Muss ich {accusative} gereinigt zurückgeben?",
             f"Ja, bitte besenrein. Sonst berechnen wir {'15' if int(weight) >= 20 else '8'} Euro für die Reinigung."),
        ]  # fmt: skip
    rng.shuffle(rows)
    return rows[: ROWS - DUPLICATES]


def main() -> None:
    """Write faq_de.csv beside this script."""
    rng = random.Random(SEED)
    rows = [list(row) for row in questions(rng)]
    for row, column in zip(rng.sample(rows, EMPTY), [2] * 6 + [1] * 3, strict=True):
        row[column] = ""
    complete = [row for row in rows if all(row)]
    for row in rng.sample(complete, DUPLICATES):
        rows.insert(rng.randrange(len(rows)), list(row))
    with open(Path(__file__).parent / "faq_de.csv", "w", encoding="utf-8-sig", newline="") as file:
        writer = csv.writer(file, delimiter=";", lineterminator="\r\n")
        writer.writerow(["nr", "kategorie", "frage", "antwort", "geändert"])
        for number, (category, question, answer) in enumerate(rows, 1):
            day = f"{rng.randint(1, 28):02}.{rng.randint(1, 12):02}.2025"
            writer.writerow([number, category, question, answer, day])


if __name__ == "__main__":
    main()

"""Requests that one of eight tools can fulfil, and the call: messages with `tools` and `tool_calls`."""

from __future__ import annotations

import random
from typing import Any

OFFERED = 3  # tools in a row, in any order; one of them fits

CITIES = (
    "Berlin Lyon Oslo Porto Kyoto Lima Cairo Boston Delhi Perth Quito Vienna Dublin Nairobi Athens Tunis Seoul".split()
)
PEOPLE = "Anna Boris Clara David Elena Felix Grace Hugo Irene Jonas Karim Lena Marta Noah".split()
ROOMS = "kitchen bedroom office hall bathroom garage attic cellar nursery library studio workshop".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
CURRENCIES = "USD EUR GBP JPY CHF NOK INR CAD".split()
TIMES = [f"{hour}:{minute:02}" for hour in range(8, 22) for minute in (0, 15, 30, 45)]
VALUES: dict[str, list[Any]] = {
    "city": CITIES,
    "day": DAYS,
    "minutes": [*range(1, 20), *range(20, 125, 5)],
    "label": ["pasta", "tea", "laundry", "eggs", "pizza", "workout", "rice", "bread", "break", "meeting"],
    "to": PEOPLE,
    "text": ["I am late", "dinner is ready", "call me back", "the train is full", "see you at six", "happy birthday",
             "the door is open", "thanks for the help", "bring some milk", "the meeting moved"],
    "amount": [*range(5, 100, 5), *range(100, 2000, 50)],
    "source": CURRENCIES,
    "target": CURRENCIES,
    "restaurant": ["Luigi's", "The Anchor", "Green Garden", "Sakura", "Old Mill", "Casa Rosa", "Blue Door", "Nonna"],
    "people": [*range(2, 13)],
    "time": TIMES,
    "artist": ["Mozart", "Nina Simone", "Queen", "Miles Davis", "Adele", "Bach", "ABBA", "Coldplay", "Björk", "Prince",
               "Chopin", "Sade", "Dido", "Santana"],
    "room": ROOMS,
    "title": ["dentist", "team lunch", "piano lesson", "haircut", "car service", "yoga", "budget review", "book club"],
    "degrees": [*range(12, 30)],
}  # fmt: skip
# Name, what it does, parameters, requests.
TOOLS = (
    ("get_weather", "Weather forecast", ("city", "day"), (
        "What will the weather be like in {city} on {day}?", "Do I need an umbrella in {city} on {day}?",
        "Tell me the forecast for {city}, {day} please.")),
    ("set_timer", "Start a timer", ("minutes", "label"), (
        "Set a timer for {minutes} minutes for the {label}.", "Start a {label} timer, {minutes} minutes.",
        "Remind me of the {label} in {minutes} minutes.")),
    ("send_message", "Send a message", ("to", "text"), (
        "Tell {to}: {text}.", 'Send {to} a message that says "{text}".',
        'Write to {to}: "{text}"')),
    ("convert_currency", "Convert money", ("amount", "source", "target"), (
        "How much is {amount} {source} in {target}?", "Convert {amount} {source} to {target}.",
        "I have {amount} {source}. What is that in {target}?")),
    ("book_table", "Reserve a table", ("restaurant", "people", "time"), (
        "Book a table for {people} at {restaurant} at {time}.",
        "We are {people}. Get us a table at {restaurant}, {time}.",
        "Reserve {restaurant} for {people} people at {time}.")),
    ("play_music", "Play music in a room", ("artist", "room"), (
        "Play {artist} in the {room}.", "I want to hear {artist} in the {room}.",
        "Put on some {artist} in the {room}.")),
    ("add_event", "Add a calendar event", ("title", "day", "time"), (
        "Put {title} in my calendar, {day} at {time}.", "Add an event: {title}, {day}, {time}.",
        "I have {title} on {day} at {time}. Write it down.")),
    ("set_heating", "Set the heating of a room", ("room", "degrees"), (
        "Set the {room} to {degrees} degrees.", "Make it {degrees} degrees in the {room}.",
        "I would like {degrees} degrees in the {room}.")),
)  # fmt: skip


def schema(name: str, description: str, parameters: tuple[str, ...]) -> dict[str, Any]:
    """A tool as OpenAI's JSON schema."""
    types = {key: {"type": "integer" if isinstance(VALUES[key][0], int) else "string"} for key in parameters}
    function = {"type": "object", "properties": types, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": function}}


def rows(rng: random.Random, training: int, held_out: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows with `messages`, whose last turn has one call, and `tools`, as JSON schemas. No call occurs twice.

    Tools take turns in both parts.
    """
    schemas = {name: schema(name, description, parameters) for name, description, parameters, _ in TOOLS}
    made, seen = [], set()
    while len(made) < training + held_out:
        name, _, parameters, requests = TOOLS[len(made) % len(TOOLS)]
        arguments = {key: rng.choice(VALUES[key]) for key in parameters}
        call = (name, *arguments.values())
        if call in seen or arguments.get("source", "") == arguments.get("target"):
            continue
        seen.add(call)
        offered = [name, *rng.sample([other for other in schemas if other != name], OFFERED - 1)]
        rng.shuffle(offered)
        function = {"name": name, "arguments": arguments}
        messages = [
            {"role": "user", "content": rng.choice(requests).format(**arguments)},
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        ]
        made.append({"messages": messages, "tools": [schemas[other] for other in offered]})
    return made[:training], made[training:]

"""Write prompt text if no file is given: plain English sentences.

Invariant: the same seed writes the same text on every machine.
"""

import random

_PEOPLE = (
    """
the baker|a retired teacher|our neighbour|the night porter|a young engineer|the harbour pilot
my aunt|the archivist|a travelling musician|the gardener|two students|the ferry captain
a tired nurse|the clockmaker|an old friend|the mayor|the librarian|a painter from the coast
the stationmaster|her brother|the beekeeper|a visiting surgeon|the postman|the translator
""".strip()
    .replace("\n", "|")
    .split("|")
)
_ACTIONS = (
    """
repaired|described|carried|measured|forgot about|photographed|sold|borrowed|looked for|wrote about
packed|cleaned|found|counted|painted|studied|explained|hid|returned|weighed|inherited|catalogued
tested|admired
""".strip()
    .replace("\n", "|")
    .split("|")
)
_THINGS = (
    """
a copper kettle|the broken lantern|three maps of the valley|a letter without a date
the long wooden ladder|a basket of pears|the second volume|an unfinished coat|the brass telescope
a handful of seeds|the yellow bicycle|a jar of honey|the tide tables|a recipe for soup|the spare key
a box of photographs|the winter timetable|a chipped blue bowl|the oldest clock|a list of names
the garden gate|a sack of flour|the weather records|a piece of rope
""".strip()
    .replace("\n", "|")
    .split("|")
)
_PLACES = (
    """
near the old bridge|behind the market hall|on the road to the mill|at the edge of the forest
in the empty station|beside the river|under the kitchen stairs|on the third floor|outside the chapel
in the reading room|by the lighthouse|at the corner of the square|in a quiet courtyard
on the northern pier|above the bakery|across the meadow
""".strip()
    .replace("\n", "|")
    .split("|")
)
_TIMES = (
    """
before sunrise|late on Tuesday|during the long rain|after the concert|in the spring of that year
while it snowed|at half past four|on the last day of school|without telling anyone
for the second time|just before the storm|when the bells rang|at the end of the harvest
after a short walk|in the middle of the night|soon afterwards
""".strip()
    .replace("\n", "|")
    .split("|")
)
_LINKS = (
    """
so nobody was surprised|and the rest is well known|although the price was high
because the letter had come|but the door stayed shut|and we laughed about it later
which pleased the children|since there was no hurry|and it took {n} days|for {n} coins
with {n} others|though only {n} were left
""".strip()
    .replace("\n", "|")
    .split("|")
)
_TEMPLATES = (
    "{Person} {action} {thing} {place} {time}.",
    "{Time}, {person} {action} {thing}, {link}.",
    "{Place}, {person} {action} {thing} and {action2} {thing2}.",
    "It was {person} who {action} {thing} {time}, {link}.",
    "{Person} {action} {thing} {place}; {person2} {action2} {thing2}.",
    "When {person} {action} {thing}, {person2} {action2} {thing2} {place}.",
)


def write_prose(seed: int, num_chars: int) -> str:
    """Write sentences of at least `num_chars` characters together, in paragraphs of seven."""
    rng = random.Random(seed)
    sentences: list[str] = []
    written = 0
    while written < num_chars:
        sentence = _write_sentence(rng)
        sentences.append(sentence + ("\n\n" if len(sentences) % 7 == 6 else " "))
        written += len(sentences[-1])
    return "".join(sentences)


def write_salt(rng: random.Random) -> str:
    """Write a short sentence with which no other prompt begins: 6 words and a number of 6 digits."""
    first, second, third = rng.sample(_THINGS, 3)
    number = rng.randrange(10**6)
    return f"Entry {number:06d}: {first}, {second}, {third}."


def _write_sentence(rng: random.Random) -> str:
    person, person2 = rng.sample(_PEOPLE, 2)
    thing, thing2 = rng.sample(_THINGS, 2)
    action, action2 = rng.sample(_ACTIONS, 2)
    place, time = rng.choice(_PLACES), rng.choice(_TIMES)
    link = rng.choice(_LINKS).format(n=rng.randint(2, 9999))
    return rng.choice(_TEMPLATES).format(
        person=person,
        Person=_capital(person),
        person2=person2,
        action=action,
        action2=action2,
        thing=thing,
        thing2=thing2,
        place=place,
        Place=_capital(place),
        time=time,
        Time=_capital(time),
        link=link,
    )


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]

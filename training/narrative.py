"""Generate endless English narrative prose from a seed, by a grammar written for this project.

The reference model was trained on it, as 15 % of the filler; the evaluations' text is another (`evals.chronicle`). A
sentence is drawn by expanding symbols of `GRAMMAR`. A run of sentences keeps a small cast and scene, so that pronouns
and names recur as in a novel, while a whole sentence practically never repeats. The invariant: the text depends on the
seed alone, has no digits and no hyphens (so needles cannot occur in it), and each sentence ends with one of `. ! ?`.
"""

import random
import re

from evals.tasks.task_words import (
    ABSTRACTIONS,
    ADJECTIVES,
    ANIMALS,
    FIRST_NAMES,
    LAST_NAMES,
    OBJECTS,
    PLACES,
    ROLES,
)

SCENE_SENTENCES = 24

GRAMMAR: dict[str, str] = {
    "sentence": """
        {actor} {went}, {manner}.
        {actor} {went}, and {subject} {did}.
        {actor} {did}, for {clause}.
        {actor} {did}, but {clause}.
        {When}, {subject} {did}.
        {When}, {subject} {went}, and {clause}.
        {actor} and {subject} {went} {time}, speaking of {topic}.
        {actor}, who {had}, {did}.
        {actor}, who {had}, {went} {manner}.
        There was {a_adj_object} {where}, and {clause}.
        There were {adj} {animals} {where}, and {subject} {watched} them {manner}.
        {Where} stood {a_adj_place}, where {subject} {did} {time}.
        "{speech}," said {subject}, {manner}.
        "{speech}," {answered} {subject}; "{speech2}."
        "{question}?" {asked} {subject}. "{Speech}."
        "{Speech}!" cried {subject}, and {went_and}.
        It was {time} that {subject} {did}; {clause}.
        It seemed to {name} that {clause}, though {clause}.
        Nothing was said of {topic} until {subject} {did}.
        {Nobody} {knew} why {subject} {did}, nor whether {clause}.
        The {adj} {animal} {animal_did} {where}, and {subject} {watched} it {manner}.
        The {object} of the {role} lay {where}, beside {a_adj_object}.
        The {adj} {weather} {weather_did} over the {place}, and {clause}.
        {actor} had {abstraction} enough, but no {abstraction}; so {subject} {did}.
        Such was the {abstraction} of {name} that {clause}.
        Of all the {roles} in the {place}, the {adj} one alone {did}.
        If {subject} {did}, it was {reason}; and {clause}.
        What {subject} wanted was {a_adj_object}, and what {name} found was {a_adj_object}.
        As for {name}, {clause}; and {clause}.
        So {adj} was the {place} that {clause}.
        Some of the {roles} {did}, while others {went}.
        {actor} opened the {object}, looked at the {adj} {object}, and {did}.
        Then came {a_adj_role} with {a_adj_object}, who {did}.
        Perhaps {clause}; perhaps it was only {abstraction}.
        Once, {where}, {subject} {did} because of {topic}.
        Not far from the {place} lived {a_adj_role}, whose {animal} {animal_did} {where}.
    """,
    "clause": """
        {subject} {did}
        {subject} {went}
        {subject} {had}
        the {adj} {role} {did}
        the {role} {believed} that the {adj} {object} was {where}
        {name} {watched} the {adj} {place} {time}
        the {object} had been left {where}
        nobody in the {place} had heard of {topic}
        the {animal} {animal_did} {where}
        there was more {abstraction} than {abstraction} in it
        the {weather} {weather_did} {time}
        every {role} {where} {did}
        no {role} could tell {abstraction} from {abstraction}
        {name} would not part with the {adj} {object}
        neither the {role} nor the {role} {did}
        the {place} was {adj} and the {place} was {adj}
    """,
    "went": """
        walked slowly toward the {place}|hurried along the {adj} {place}|went down to the {adj} {place}
        rode past the {place} of the {role}|climbed the {place} behind the {place}|returned to the {adj} {place}
        crossed the {place} with {a_adj_object}|wandered from the {place} to the {place}|set out for the {adj} {place}
        crept around the {place}|passed through the {adj} {place} of {city_like}|came back by way of the {place}
        followed the {adj} {animal} into the {place}|sailed beyond the {place}|stepped out of the {adj} {place}
        turned aside at the {place}|led the {animal} through the {place}|drove as far as the {adj} {place}
    """,
    "went_and": """
        ran to the {place}|threw down the {object}|snatched up the {adj} {object}|shut the {adj} {object}
        leapt over the {place}|called for the {role}|struck the {object} with the {object}|vanished into the {place}
    """,
    "did": """
        carried {a_adj_object} to the {role}|bought {a_adj_object} from the {adj} {role}|hid the {object} {where}
        spoke of {topic} to the {role}|asked the {role} about {topic}|thought of nothing but {topic}
        mended the {adj} {object} of the {role}|sold the {animal} to {a_adj_role}|wrote to the {role} about the {object}
        forgot the {object} {where}|found {a_adj_object} {where}|lost the {adj} {object} {where}
        gave the {role} {a_adj_object}|took the {object} from the {adj} {role}|dreamed of {a_adj_place}
        listened to the {role} {time}|laughed at the {abstraction} of the {role}|praised the {abstraction} of {name}
        waited {where} for the {adj} {role}|fed the {adj} {animal} {time}|painted the {place} and the {adj} {animal}
        quarreled with {a_adj_role} about {topic}|promised the {role} {a_adj_object}|kept the {object} in {a_adj_object}
        counted the {animals} {where}|told the {role} a story of {a_adj_animal}|envied the {adj} {role}
        feared the {abstraction} of the {role}|learned something of {topic}|begged the {role} for {a_adj_object}
        slept {where} beside the {animal}|sang of {topic} {time}|broke the {object} against the {object}
        wept over the {adj} {object}|read aloud from the {adj} {object}|burned the {object} {where}
        trusted neither the {role} nor the {role}|warned the {adj} {role} of {topic}|played the {object} for the {role}
        looked for the {adj} {animal} {where}|owed {a_adj_object} to the {role}|stitched the {object} of {a_adj_role}
    """,
    "had": """
        had once been {a_adj_role}|had never seen {a_adj_animal}|owned {a_adj_place} {where}
        had inherited {a_adj_object} and {a_adj_animal}|had heard of {topic} from the {role}
        knew the {adj} {role} by sight|had little {abstraction} left|was known {where} for {abstraction}
        had long served the {adj} {role}|had buried {a_adj_object} {where}|was {adj} rather than {adj}
        had learned {abstraction} from {a_adj_role}|had married the {adj} {role}|was afraid of {animals} and {roles}
    """,
    "topic": """
        the {adj} {place}|the {abstraction} of the {role}|the {role} and the {object}|{abstraction} and {abstraction}
        the {object} that was lost {where}|the {adj} {role} of the {place}|{name} and the {animal}
        the {abstraction} of {name}|{a_place} that no one had seen|the price of {animals}|the {adj} {weather}
    """,
    "where": """
        near the {place}|under the {adj} {object}|behind the {adj} {place}|beside the {place}|in the {adj} {place}
        beyond the {place} and the {place}|at the edge of the {place}|between the {place} and the {place}
        within sight of the {adj} {place}|on the way to the {place}|in the {place} of the {role}|above the {place}
        not far from the {adj} {place}|at the end of the {place}|among the {animals}|in the shadow of the {place}
    """,
    "time": """
        that evening|in the morning|at noon|before the harvest|after the {adj} winter|toward midnight|all summer
        for many years|on the third day|in those days|before supper|until the {weather} passed|every autumn
        at daybreak|long after dark|while the {animals} slept|on the eve of the fair|for the space of an hour
        when the bells rang|in the spring of that year|between dawn and breakfast|one {adj} afternoon
    """,
    "manner": """
        with great {abstraction}|without a word|in {a_adj_voice} voice|with {a_adj_object} in hand
        as if nothing had happened|full of {abstraction}|like {a_adj_animal}|not without {abstraction}
        as {adj} as {a_adj_animal}|with more {abstraction} than {abstraction}|out of mere {abstraction}
        like one who thinks of {topic}|in spite of the {role}|for the sake of {abstraction}|after some {abstraction}
        to the {abstraction} of the {adj} {role}|half in {abstraction} and half in {abstraction}
    """,
    "reason": """
        from {abstraction}|for want of {abstraction}|out of {abstraction} toward the {role}|because of the {weather}
        for the sake of the {adj} {animal}|owing to {topic}|by the advice of {a_adj_role}
    """,
    "speech": """
        I have seen the {object} {where}|you must speak to the {role} about {topic}
        there is no {abstraction} in the {place}|we want {abstraction} more than {abstraction}
        the {role} has taken my {adj} {object}|we shall meet {where} {time}|only the {role} can mend {a_adj_object}
        my {object} is worth more than your {adj} {animal}|the {adj} {role} will never forgive us
        I would give my {animal} for {a_adj_object}|they say the {place} is full of {animals}|you were always {adj}
        let the {role} look after the {animal}|{abstraction} is a poor {role}|the road to the {place} is {adj} and {adj}
        one {object} is as good as another|it was {name} who found the {object}|I never believed in {topic}
        the {weather} will spoil the {object}
    """,
    "question": """
        Where is the {adj} {object}|Who has been {where}|Why did the {role} leave the {place}|Have you seen my {animal}
        What do you know of {topic}|Is the {role} still so {adj}|When will {name} come to the {place}
        How can {a_adj_role} live without {abstraction}|Did you hear the {animal} {where}|Must we speak of {topic}
    """,
    "weather": "rain|mist|wind|storm|snow|frost|fog|thunder|sunlight|moonlight|twilight|hail|drizzle|breeze|haze|sleet",
    "weather_did": """
        hung low|moved slowly|gathered|drifted in|came on|settled|grew fainter|lingered|broke at last|stole in|spread
        died away|rose again|lasted
    """,
    "animal_did": """
        slept|wandered|waited|hid|listened|strayed|fed|lay still|cried out|fled|drank|watched|limped about|hunted|rested
        circled|trembled|rolled over|disappeared
    """,
    "watched": "watched|observed|studied|regarded|remembered|described|counted|followed|pitied|admired",
    "asked": "asked|inquired|whispered|demanded|repeated|murmured",
    "answered": "answered|replied|said|returned|declared|muttered|explained|insisted",
    "knew": "knew|guessed|asked|understood|remembered|could say|inquired|suspected",
    "believed": "knew|guessed|understood|remembered|suspected|believed|feared|swore|hoped|had heard",
    "Nobody": "Nobody|No one {where}|Not even {name}|None of the {roles}|Few of the {roles}|Hardly {a_adj_role}",
    "actor": "{Subject}|{Subject}|The {adj} {role}|{Name}|{Name}|Old {Name}|The {role} of the {place}|Poor {Name}",
    "subject": "{pronoun}|{pronoun}|{name}|{name}|the {role}|the {adj} {role}|{full_name}",
    "city_like": "the {role}|the {roles}|the {adj} {roles}|{full_name}",
}
LISTS = {
    "adj": ADJECTIVES,
    "object": OBJECTS,
    "place": PLACES,
    "role": ROLES,
    "animal": ANIMALS,
    "abstraction": ABSTRACTIONS,
}
IRREGULAR_PLURALS = {
    "calf": "calves", "deer": "deer", "fox": "foxes", "goose": "geese", "mouse": "mice", "ox": "oxen",
    "salmon": "salmon", "sheep": "sheep", "thief": "thieves", "thrush": "thrushes", "trout": "trout", "wolf": "wolves",
    "fisherman": "fishermen", "ferryman": "ferrymen", "boatman": "boatmen", "coachman": "coachmen", "finch": "finches",
    "watchman": "watchmen", "postman": "postmen", "duchess": "duchesses", "countess": "countesses", "ferry": "ferries",
    "witness": "witnesses", "governess": "governesses", "butterfly": "butterflies", "pony": "ponies",
    "puppy": "puppies", "lady": "ladies", "landlady": "landladies", "secretary": "secretaries", "grouse": "grouse",
}  # fmt: skip
PARTS = {
    symbol: [
        [part for part in re.split(r"(\{\w+\})", option.strip()) if part]
        for option in re.split(r"[\n|]", options)
        if option.strip()
    ]
    for symbol, options in GRAMMAR.items()
}


def plural(noun: str) -> str:
    """Return the plural of a noun of the vocabulary."""
    return IRREGULAR_PLURALS.get(noun, noun + "s")


def with_article(words: str) -> str:
    """Return the words with `a` or `an` before them."""
    return ("an " if words[0] in "aeiou" and not words.startswith("uni") else "a ") + words


class Narrator:
    """Draws sentences from one seed. It keeps the cast of the present scene and its pronouns."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(f"narrative-{seed}")
        self.num_told = 0
        self.cast: list[str] = []

    def sentence(self) -> str:
        """Return the next sentence, with a capital and its final mark."""
        if self.num_told % SCENE_SENTENCES == 0:
            self.cast = self.random.sample(FIRST_NAMES, 4)
        self.num_told += 1
        text = self._expand("sentence")
        start = 1 if text[0] == '"' else 0
        return text[:start] + text[start].upper() + text[start + 1 :]

    def _expand(self, symbol: str) -> str:
        draw = self.random
        parts = PARTS[symbol][int(draw.random() * len(PARTS[symbol]))]
        return "".join(self._fill(part[1:-1]) if part[0] == "{" else part for part in parts)

    def _fill(self, symbol: str) -> str:
        pick = self.random.random
        if symbol in LISTS:
            return LISTS[symbol][int(pick() * len(LISTS[symbol]))]
        if symbol in ("name", "Name"):
            return self.cast[int(pick() * len(self.cast))]
        if symbol == "full_name":
            return self.cast[int(pick() * len(self.cast))] + " " + LAST_NAMES[int(pick() * len(LAST_NAMES))]
        if symbol == "pronoun":
            return ("he", "she", "they", "we")[int(pick() * 4)]
        if symbol in ("animals", "roles"):
            return plural(self._fill(symbol[:-1]))
        if symbol == "a_adj_voice":
            return with_article(self._fill("adj"))
        if symbol == "a_place":
            return with_article(self._fill("place"))
        if symbol.startswith("a_adj_"):
            noun = self._fill(symbol[6:])
            return with_article(self._fill("adj") + " " + noun if pick() < 0.7 else noun)
        if symbol == "When":
            return self._expand("time")
        if symbol == "speech2":
            return self._expand("speech")
        if symbol in PARTS:
            return self._expand(symbol)
        words = self._expand(symbol.lower())
        return words[0].upper() + words[1:]

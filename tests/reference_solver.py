"""Answers to the reference model's questions, read off the document alone; it shares nothing with the generators."""

import re
from collections import Counter


def numbers_of(document: str, key: str) -> list[str]:
    return re.findall(rf"special magic (?:number|word) for {key} is (\w+)\.", document)


def follow(document: str, number: str) -> list[str]:
    names = re.findall(rf"VAR (\w+) = {number}\.", document)
    while further := re.findall(rf"VAR (\w+) = VAR {names[-1]}\.", document):
        names += further
    return names


def one(pattern: str, document: str) -> str:
    found = re.findall(pattern, document)
    assert len(found) == 1, (pattern, found)
    return found[0]


def solve(document: str, question: str) -> str:
    """The answer, from the document alone."""
    if match := re.fullmatch(r"What is the special magic (?:number|word) for ([\w-]+)\?", question):
        (found,) = numbers_of(document, match[1])
        return found
    if match := re.fullmatch(r"What are all the special magic numbers for ([\w-]+)\?", question):
        return ", ".join(numbers_of(document, match[1]))
    if match := re.fullmatch(r"What are the special magic numbers for (.+)\?", question):
        return ", ".join(numbers_of(document, key)[0] for key in match[1].split(", "))
    if match := re.fullmatch(r"Where does (.+) live\?", question):
        return one(rf"{match[1]} lives in ([\w ]+)\.", document)
    if match := re.fullmatch(r"What does (.+) work as\?", question):
        return one(rf"{match[1]} works as ([\w ]+)\.", document)
    if match := re.fullmatch(r"Who is the mayor of the city where (.+) lives\?", question):
        city = one(rf"{match[1]} lives in ([\w ]+)\.", document)
        return one(rf"The mayor of {city} is ([\w ]+)\.", document)
    if match := re.fullmatch(r"Who is the mayor of ([\w ]+)\?", question):
        return one(rf"The mayor of {match[1]} is ([\w ]+)\.", document)
    if match := re.fullmatch(r"Find all variables that are assigned the value (\d+)\.", question):
        return ", ".join(follow(document, match[1]))
    if question.startswith("List every"):
        return "\n".join(f"{key}: {number}" for key, number in re.findall(r"number for ([\w-]+) is (\d+)\.", document))
    counts = Counter(document.split(", "))
    if question == "What is the most common word in the list above?":
        (first, times), (_, others) = counts.most_common(2)
        assert times > others
        return first
    assert question == "What are the 3 most common words in the list above, in alphabetical order?"
    ranked = counts.most_common(4)
    assert ranked[2][1] > ranked[3][1]
    return ", ".join(sorted(word for word, _ in ranked[:3]))

"""The words of the check: private ones with the field's in their place, and the exceptions with their reasons."""

from __future__ import annotations

from dataclasses import dataclass

# Private word in prose -> the field's word.
WORDS = {
    r"stimulus|stimuli": "event",
    r"twins?": "simulator",
    r"thrift": "cost factor",
    r"lapsed": "silent at expiry",
    r"rungs?": "scaling option",
    r"succession": "adoption",
    r"autoscale": "planner",
    r"(?:is|are|was|were) born": "spawn name",
    r"GpuReturns?": "GPUs pending release",
    r"onlookers?": "observer",
}
# Private name -> the field's. Not here, although house words name them: `told`, `asked`, `room` and `words` as plain
# local names; `born`, `course`, `asked_s`, `spares` and `guests`, which are keys of the statefile or of status; `rung`
# and `lead` in the records of lead times, whose JSON has those keys.
# Leading underscores are not compared. The name of a function ends with `()`.
NAMES = {
    r"Shell": "Controller",
    r"Draft|draft": "step builder",
    r"(?!.*_id$).*[Ss]timul(us|i)": "event (the public key `stimulus_id` stays)",
    r"Instructions?": "Effect",
    r"headed": "target component",
    r"lapsed": "silent_at_expiry",
    r"held_back": "waiting for etcd or NATS",
    r"GpuReturn": "GPUs pending release",
    r"Standing|standing": "policy status",
    r"Pull|Puller|Wants": "observation, collector, needs",
    r"[Tt]hrift(_\w+)?": "cost factor",
    r"Spared": "prewarmed process",
    r"Orders": "commands",
    r"Gathered|Observing|Drifting|Keeping|Holding|Spending": "a noun",
    r"[Oo]nlookers?(_\w+)?": "observer",
}
# Module or package -> its subject.
MODULES = {
    "shell": "controller",
    "draft": "step builder",
    "stimuli": "events",
    "instructions": "effects",
    "lacking": "degraded",
    "living": "liveness",
    "succession": "adoption",
    "autoscale": "planner",
    "twin": "simulator",
    "wish": "deployment spec",
    "rich": "sim API",
    "extras": "sim API",
    "orders": "commands",
    "standing": "policy status",
    "puller": "collector",
    "pulling": "collector",
    "thrift": "cost factor",
    "guests": "colocated",
    "spares": "prewarmed",
    "spare": "prewarmed",
    "spared": "prewarmed",
    "keeping": "a subject",
    "holding": "a subject",
    "spending": "a subject",
    "observing": "observation",
    "drifting": "drift",
    "asking": "a subject",
}


@dataclass(frozen=True, slots=True)
class Exempt:
    """A finding that stays: where, under which rule, in which text, and why."""

    path: str
    rule: str
    text: str
    why: str


EXCEPTIONS = (
    Exempt("dynamo_local/profile/interpolation.py", "length", "interpolators", "an example in code, in a comment"),
    Exempt("CHANGELOG.md", "word", "", "what was renamed is named"),
    Exempt("CHANGELOG.md", "name", "", "what was renamed is named"),
    Exempt("docs/seeds.md", "reference", "", "the page about the five documents that the customer gave"),
    Exempt("docs/lessons.md", "reference", "", "the page that has the numbers"),
    Exempt("tests/tools/prose/*", "word", "", "the checker and its test name what they forbid"),
    Exempt("tests/tools/prose/*", "reference", "", "the checker and its test name what they forbid"),
    Exempt("tests/tools/prose/*", "opening", "", "the checker and its test name what they forbid"),
    Exempt("benchmarks/contest/rungs.py", "name", "^thrift$", "files of facts that are kept have it"),
    Exempt("*", "name", "^spares$", "the option `spares` of a configuration is public"),
)

"""The exercises of the notebooks, and the check of what a learner writes.

    @check
    def advantages(rewards_G):
        ...  # the learner's code

`check` finds the exercise by the function's name and prints its judgement. It returns the package's function until the answer is
right, so a notebook also runs from top to bottom with nothing filled in.
"""

from composer_nb.labs.exercises import learning, rewards, systems, weights
from composer_nb.labs.exercises.exercise import Exercise, Function

EXERCISES = {
    name.lower(): exercise
    for module in (learning, rewards, weights, systems)
    for name, exercise in vars(module).items()
    if isinstance(exercise, Exercise)
}


def check(function: Function) -> Function:
    """Print whether a learner's function is right, with a hint if its mistake is a usual one. Return it if it is right, else the
    package's. Raises ValueError if no exercise has its name."""
    name = function.__name__
    if name not in EXERCISES:
        raise ValueError(f"no exercise is called {name!r}; the exercises are {', '.join(EXERCISES)}")
    state, text = EXERCISES[name].judge(function)
    print(f"{name}: {text}")
    return function if state == "right" else EXERCISES[name].reference

"""Notes about graphs, as tests read them."""

from dualkg.data.triples import Notes


def texts(notes: Notes) -> list[str]:
    """The sentences in their Python wording."""
    return [str(sentence) for sentence in notes.sentences()]

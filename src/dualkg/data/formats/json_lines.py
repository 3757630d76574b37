"""JSON: an object or an array of three names per line, or one array of them."""

import json
from collections.abc import Iterator
from typing import Any

from dualkg.data.readers import RowReader, reads

EXAMPLE = '{"head": "France", "relation": "capital", "tail": "Paris"}'


@reads(".jsonl", ".ndjson", ".json")
class JsonReader(RowReader):
    """Lines of JSON; a `.json` file may also be one array."""

    def rows(self) -> Iterator[tuple[str, Any]]:
        with self.data.open() as stream:
            is_array = stream.peek(1)[:1] == b"[" and self.data.suffix == ".json"
            if is_array:
                array = self._parse(stream.read(), "its array")
                for number, row in enumerate(array, start=1):
                    yield f"row {number:,}", row
                return

            for number, line in enumerate(stream, start=1):
                if line.strip():
                    place = f"line {number:,}"
                    yield place, self._parse(line, place)

    def _parse(self, content: bytes, place: str) -> Any:
        try:
            return json.loads(content.decode("utf-8-sig"))
        except UnicodeDecodeError:
            problem = "this is not valid UTF-8"
            raise self.unusable(problem, place=place, advice="Save the file as UTF-8.") from None
        except (ValueError, RecursionError) as error:
            problem = f"this is not JSON ({error})"
            advice = f"Each line should be an object such as {EXAMPLE}."
            raise self.unusable(problem, place=place, advice=advice) from None

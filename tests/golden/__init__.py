"""Small trainings, and a run on the bundled graph, compared with a record of an earlier version.

`make golden` records them again, in golden.json. `record.py` says what is recorded and how exact
the comparison is on the machine of the record and on others.
"""

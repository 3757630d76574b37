"""The formats of files of triples: each module is the reader of a format, and registers itself.

All modules of this folder are imported when a file is first read (`dualkg.data.readers`), so a new
format is one new file here.
"""

"""Everything that reproduces the paper: tables, figures, records and studies of the product."""

"""Rows of the table of models for trainers."""

from tests.integrations.model_table import ModelRow

ROWS: list[ModelRow] = []

"What every head of any model sees, and whether that is what was promised."
from .report import Examination, Finding, examine

"""`python -m genai_cli.cli` is the `genai` program."""

from genai_cli.cli.program import main

main()

VENV ?= .venv
PACKAGES = platform engine kernels adapters migrations
NS = build/ns/loraplex

.PHONY: ns check
ns:
	@mkdir -p $(NS) && for p in $(PACKAGES); do ln -sfn ../../../$$p $(NS)/$$p; done

check: ns
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python
	PYTHONPATH=build/ns $(VENV)/bin/lint-imports

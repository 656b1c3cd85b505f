"""The whole campaign: ``python -m tests.faults``; ``--help`` lists the options."""

from tests.faults.campaign import main

if __name__ == "__main__":
    main()

"""The ``weenv`` program: the whole command tree, or at once what does not need it.

``weenv run --rm PLAN`` on a node that knows the plan takes less time than importing what parses command lines; see
weenv.environment.quick. Everything else, and every fault, is weenv.cli.main's.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line and exit the process."""
    if sys.argv[1:2] == ["run"] and not os.environ.get("WEENV_DEBUG"):
        from weenv.core.errors import WeenvError
        from weenv.environment import quick

        try:
            status = quick.run(sys.argv[2:])
        except (WeenvError, OSError) as error:
            from weenv.cli.main import explain

            sys.stderr.write(explain(error) + "\n")
            status = error.exit_code if isinstance(error, WeenvError) else 1
        except KeyboardInterrupt:  # nothing has been made yet
            status = 130
        if status is not None:
            sys.stderr.flush()
            os._exit(status)
    from weenv.cli.main import main as whole

    whole()


if __name__ == "__main__":
    main()

"""Run the command line where nothing is installed: `python -m server.commands`."""

from server.commands.tandem import main

main()

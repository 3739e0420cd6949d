"""Old path of `flower_preload`: SuperNodes that version 0.3 has started still use it."""

from feddrift.deploy.processes.flower_preload import main

if __name__ == "__main__":
    main()

"""Start `flower_preload` by its path of version 0.3, which the SuperNodes of running deployments still use."""

from feddrift.deploy.processes.flower_preload import main

if __name__ == "__main__":
    main()

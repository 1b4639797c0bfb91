//! What `cargo xtask bench transfer` runs: the cases of the speed table, each with its command and its limit.

/// One run of a program, and what its figures are held against.
pub(super) struct Step {
    /// What is measured, in words.
    pub(super) case: &'static str,
    pub(super) rule: Rule,
    /// The program.
    pub(super) program: &'static str,
    /// Words of the command line after the program's name.
    pub(super) args: &'static str,
}

/// Everything that moves bytes.
pub(super) const TRANSFER_BENCH: &str = "transfer-bench";
/// Plans and posts, with a heap that is counted.
const PLAN_BENCH: &str = "plan-bench";
/// All programs of the steps.
pub(super) const PROGRAMS: [&str; 2] = [TRANSFER_BENCH, PLAN_BENCH];

/// What a figure is held against.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Rule {
    /// Share of the bare loop of the path, at least.
    Limit(f64),
    /// Share of the plain copies, at least.
    Memcpy(f64),
    /// The plain copy of the request and this many microseconds, at most.
    OverMemcpyUs(f64),
    /// From the post to seen in microseconds, middle one, at most.
    SeenUs(f64),
    /// The bare wake and this many microseconds, middle one and one in a hundred, at most.
    OverBareUs(f64, f64),
    /// Plan and posts in milliseconds, and bytes a descriptor, at most.
    Plan(f64, f64),
    /// Microseconds a post, at most, with the inline copies in it.
    PostUs(f64),
    /// Cores and context switches a second with a peer, at most; nothing without.
    Idle(f64, f64),
    /// A curve: no limit.
    Curve,
}

const fn step(case: &'static str, rule: Rule, args: &'static str) -> Step {
    Step {
        case,
        rule,
        program: TRANSFER_BENCH,
        args,
    }
}

const fn plan(case: &'static str, rule: Rule, args: &'static str) -> Step {
    Step {
        program: PLAN_BENCH,
        ..step(case, rule, args)
    }
}

/// In the order in which they run.
pub(super) const STEPS: [Step; 27] = [
    step(
        "shm, write, 1 MiB and more",
        Rule::Memcpy(0.90),
        "--backend shm --op write --page-bytes 4096,8448,16384,37376,65536 --pages 1024 --duration 1",
    ),
    step(
        "shm, read, 1 MiB and more",
        Rule::Memcpy(0.90),
        "--backend shm --op read --page-bytes 4096,8448,16384,37376,65536 --pages 1024 --duration 1",
    ),
    step(
        "shm, write, 8 in flight",
        Rule::Memcpy(0.90),
        "--backend shm --op write --page-bytes 4096,8448 --pages 64 --concurrency 8 --duration 1",
    ),
    step(
        "shm, read, 8 in flight",
        Rule::Memcpy(0.90),
        "--backend shm --op read --page-bytes 4096,8448 --pages 64 --concurrency 8 --duration 1",
    ),
    step(
        "shm, write, one small request",
        Rule::OverMemcpyUs(2.0),
        "--backend shm --op write --page-bytes 8448 --pages 1 --duration 1",
    ),
    step(
        "shm, read, one small request",
        Rule::OverMemcpyUs(2.0),
        "--backend shm --op read --page-bytes 8448 --pages 1 --duration 1",
    ),
    step(
        "shm, write, small pages",
        Rule::Memcpy(0.50),
        "--backend shm --op write --page-bytes 576 --pages 1024 --duration 1",
    ),
    step(
        "shm, read, small pages",
        Rule::Memcpy(0.50),
        "--backend shm --op read --page-bytes 576 --pages 1024 --duration 1",
    ),
    step(
        "shm, a spinning reader sees a page",
        Rule::SeenUs(1.5),
        "latency --backend shm --waiter spin",
    ),
    step(
        "shm, a reader parked for 200 us sees a page",
        Rule::OverBareUs(4.0, 20.0),
        "latency --backend shm --waiter park --park-us 200",
    ),
    step(
        "shm, a reader parked for 10 ms sees a page",
        Rule::OverBareUs(4.0, 20.0),
        "latency --backend shm --waiter park --park-us 10000",
    ),
    step(
        "cma, write",
        Rule::Limit(0.90),
        "--backend cma --op write --page-bytes 4096,8448,65536 --pages 1024 --duration 1",
    ),
    step(
        "cma, read",
        Rule::Limit(0.90),
        "--backend cma --op read --page-bytes 4096,8448,65536 --pages 1024 --duration 1",
    ),
    step(
        "tcp, write",
        Rule::Limit(0.85),
        "--backend tcp --op write --page-bytes 4096,8448,65536 --pages 64,1024 --duration 1",
    ),
    step(
        "tcp, read",
        Rule::Limit(0.85),
        "--backend tcp --op read --page-bytes 4096,8448,65536 --pages 64,1024 --duration 1",
    ),
    step(
        "ucx over tcp, write",
        Rule::Limit(0.85),
        "--backend ucx --op write --page-bytes 4096,8448,65536 --pages 64,1024 --duration 1",
    ),
    step(
        "ucx over tcp, read",
        Rule::Limit(0.85),
        "--backend ucx --op read --page-bytes 4096,8448,65536 --pages 64,1024 --duration 1",
    ),
    step(
        "libfabric over tcp, write",
        Rule::Limit(0.85),
        "--backend libfabric --op write --page-bytes 4096,8448,65536 --pages 64,1024 --duration 1",
    ),
    step(
        "libfabric over tcp, read",
        Rule::Limit(0.85),
        "--backend libfabric --op read --page-bytes 4096,8448,65536 --pages 64,1024 --duration 1",
    ),
    plan(
        "Flash, 1,048,576 tokens",
        Rule::Plan(10.0, 16.0),
        "--model flash --tokens 1048576",
    ),
    plan(
        "Flash, 9,800 tokens, posts",
        Rule::PostUs(10.0),
        "--model flash --tokens 9800",
    ),
    step(
        "Flash, 9,800 tokens, all components, bf16 index-K, shm, write",
        Rule::Memcpy(0.85),
        "--backend shm --op write --model flash --tokens 9800 --index-k bf16 --duration 2",
    ),
    step(
        "a target parked for 200 us gets a notification",
        Rule::OverBareUs(8.0, 40.0),
        "notify --backend shm --park-us 200",
    ),
    step(
        "a target parked for 10 ms gets a notification",
        Rule::OverBareUs(8.0, 40.0),
        "notify --backend shm --park-us 10000",
    ),
    step(
        "idle agent",
        Rule::Idle(0.001, 1.0),
        "idle --backend shm --seconds 60",
    ),
    step(
        "shm, cost per page",
        Rule::Curve,
        "--backend shm --op write --page-bytes 576 --pages 64,256,1024,4096,16384,65536,262144,1000000 --duration 0.5",
    ),
    step(
        "tcp, cost per page",
        Rule::Curve,
        "--backend tcp --op write --page-bytes 576 --pages 64,256,1024,4096,16384,65536,262144,1000000 --duration 0.5",
    ),
];

/// Pictures of the curves, by the case.
pub(super) const CURVES: [(&str, &str); 2] = [
    ("shm, cost per page", "cost-per-page-shm.svg"),
    ("tcp, cost per page", "cost-per-page-tcp.svg"),
];

/// The grid, for one direction and picture.
pub(super) const GRIDS: [(&str, &str); 2] =
    [("write", "grid-write.svg"), ("read", "grid-read.svg")];

/// What follows `--op` of a grid.
pub(super) const GRID_ARGS: &str = "--backend shm --page-bytes 576,4096,8448,16384,37376,65536,1048576 \
                                    --pages 1,64,1024 --duration 0.05 --compare --compare-with cma,tcp,ucx,libfabric \
                                    --compare-rounds 1 --compare-ms 10";

/// The same in less time: fewer and shorter slices, a smaller grid. For a look, not for figures.
pub(super) fn quick(args: &str) -> String {
    args.replace("--duration 1", "--duration 0.2")
        .replace("--duration 2", "--duration 0.4")
        .replace("--seconds 60", "--seconds 5")
        .replace("576,4096,8448,16384,37376,65536,1048576", "576,8448,37376")
        .replace("--pages 1,64,1024", "--pages 64,1024")
        .replace("--compare-ms 10", "--compare-ms 4")
}

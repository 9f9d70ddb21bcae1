// Ours without Python: ours_peer SOCKET RANKS [staged] forks the ranks of one node, each with an Executor, and lets the
// harness give orders to each of them. They reach each other's memory as ranks from Python do; with `staged` they do not.
#include <linux/futex.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <atomic>
#include <string>
#include <vector>

#include "fireflyer/collectives/executor.hpp"
#include "orders.h"

namespace {

constexpr std::uint32_t slots = 4;
constexpr std::size_t chunk_bytes = 256 << 10;
constexpr std::int64_t timeout_ns = 30'000'000'000;
constexpr useconds_t idle_us = 2000;  // by then a rank that waits sleeps in a futex

// What the ranks tell each other beside the library, in memory that all of them have from before they were forked.
struct Board {
  std::atomic<int> ready;
  ff::MemoryProbe probes[ff::max_local_ranks];
  std::atomic<double> called_s;
  std::atomic<std::uint32_t> word;
};

Board* board = nullptr;

void futex(int operation, std::uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&board->word), operation, value, nullptr, nullptr, 0);
}

// In the calling thread where the executor can, otherwise in its own.
template <class Any>
std::shared_ptr<ff::Work> start(Any& executor, const ff::OpDescriptor& op, char* data) {
  if constexpr (requires { executor.call(op, data, data, timeout_ns); }) return executor.call(op, data, data, timeout_ns);
  else return executor.submit(op.kind, data, op.count, op.dtype, op.root);
}

class Rank {
 public:
  Rank(int rank, int ranks, ff::Config config) : rank_(rank), ranks_(ranks), executor_(std::move(config)) {}

  void obey() {
    char line[MAX_LINE], *words[MAX_WORDS];
    while (orders_next(line, words) > 0) {
      const std::string order = words[0];
      if (order == "prepare") prepare(words[1], std::stoull(words[2]));
      if (order == "time") measure(std::stoi(words[2]));
      if (order == "check") check();
      if (order == "wake") wake(words[1], std::stoi(words[2]));
    }
    executor_.close();
  }

 private:
  void prepare(const char* dtype, std::size_t bytes) {
    dtype_ = ff::dtype_from_name(std::string(dtype) == "fp32" ? "f32" : std::string(dtype) == "fp16" ? "f16" : dtype);
    bytes_ = bytes;
    for (char* old : {data_, own_block_, sum_block_}) std::free(old);
    data_ = own_block_ = sum_block_ = nullptr;
    if (bytes > 0) {
      block_bytes_ = BLOCK * type_bytes(dtype);
      data_ = static_cast<char*>(big_buffer(bytes));
      own_block_ = make_block(rank_, dtype);
      sum_block_ = make_block(-ranks_, dtype);
      fill_with(data_, bytes, own_block_, block_bytes_);
    }
    ANSWER("{}");
  }

  void run(ff::OpKind kind) {
    ff::OpDescriptor op;
    op.kind = kind;
    op.dtype = dtype_;
    op.count = kind == ff::OpKind::barrier ? 0 : bytes_ / ff::dtype_size(dtype_);
    const auto work = start(executor_, op, data_);
    if (work == nullptr) return;
    work->wait(-1);
    const ff::Failure failure = work->failure();
    if (failure.kind == ff::FailureKind::none) return;
    std::fprintf(stderr, "%s\n", failure.text.c_str());
    _exit(1);
  }

  void measure(int loops) {
    loops_ = loops;
    std::vector<double> each(static_cast<std::size_t>(loops));
    fill_with(data_, bytes_, own_block_, block_bytes_);
    run(ff::OpKind::barrier);
    const double begun = now_s();
    double before = begun;
    for (double& seconds : each) {
      run(ff::OpKind::allreduce);
      const double after = now_s();
      seconds = after - before;
      before = after;
    }
    answer_times(before - begun, each.data(), loops);
  }

  // How long after rank 0's call the other rank goes on, which has slept since. "futex": without the library.
  void wake(const std::string& what, int loops) {
    std::vector<double> each(static_cast<std::size_t>(loops));
    board->word.store(0);
    run(ff::OpKind::barrier);
    const double begun = now_s();
    for (std::uint32_t number = 1; double& seconds : each) {
      if (rank_ == 0) {
        usleep(idle_us);
        board->called_s.store(now_s());
      }
      if (what == "ours") {
        run(ff::OpKind::barrier);
      } else if (rank_ == 0) {
        board->word.store(number);
        futex(FUTEX_WAKE, 1);
      } else {
        while (board->word.load() != number) futex(FUTEX_WAIT, number - 1);
      }
      seconds = now_s() - board->called_s.load();
      ++number;
    }
    answer_times(now_s() - begun, each.data(), loops);
  }

  void check() {
    if (loops_ > 1) {  // many in a row do not end in a sum that is known
      fill_with(data_, bytes_, own_block_, block_bytes_);
      run(ff::OpKind::allreduce);
    }
    ANSWER("{\"right\": %s}", filled_with(data_, bytes_, sum_block_, block_bytes_) ? "true" : "false");
  }

  int rank_, ranks_, loops_ = 1;
  ff::Executor executor_;
  ff::DType dtype_ = ff::DType::f32;
  char *data_ = nullptr, *own_block_ = nullptr, *sum_block_ = nullptr;
  std::size_t bytes_ = 0, block_bytes_ = 0;
};

int window = -1, doorbell = -1;
std::vector<std::pair<int, int>> to_leader;  // (leader's end, other end) for ranks 1, 2, ...

ff::Config config_of(int rank, int ranks, bool staged) {
  ff::Config config;
  board->probes[rank] = ff::memory_probe();
  for (++board->ready; board->ready < ranks;) usleep(100);
  if (!staged) {
    for (int r = 0; r < ranks; ++r) config.local_peers.push_back({board->probes[r], -1});
  }
  config.group.rank = rank;
  config.group.node_of_rank.assign(static_cast<std::size_t>(ranks), 0);
  for (int r = 0; r < ranks; ++r) config.group.labels.push_back("rank " + std::to_string(r));
  config.group.timeout_ns = timeout_ns;
  config.window_fd = window;
  config.doorbell_fd = doorbell;
  for (int r = 1; r < ranks; ++r) {
    const auto& [leaders, others] = to_leader[static_cast<std::size_t>(r - 1)];
    if (rank == 0) config.local_fds.emplace_back(r, leaders);
    if (rank == r) config.leader_fd = others;
    if (rank != r) close(others);
    if (rank != 0) close(leaders);
  }
  return config;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3 && argc != 4) return 2;
  board = static_cast<Board*>(mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  if (board == MAP_FAILED) die("mmap");
  const int ranks = std::atoi(argv[2]);
  window = ff::Window::create(ranks, slots, chunk_bytes);
  doorbell = eventfd(0, EFD_NONBLOCK);
  for (int r = 1; r < ranks; ++r) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0) die("socketpair");
    to_leader.emplace_back(pair[0], pair[1]);
  }
  int rank = 0;
  while (rank < ranks && fork() != 0) ++rank;
  if (rank == ranks) {  // the parent only waits
    for (const auto& [leaders, others] : to_leader) close(leaders), close(others);
    int status, failures = 0;
    while (wait(&status) > 0) failures += status != 0;
    return failures;
  }
  const ff::OpenMemory open;  // before any other rank looks whether it may read this one's
  Rank self(rank, ranks, config_of(rank, ranks, argc == 4));
  orders_open(argv[1], rank, "");
  self.obey();
  return 0;
}

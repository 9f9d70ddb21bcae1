// Ours without Python: ours_peer SOCKET NODES RANKS SLOTS TREES ROUTES forks the ranks of all nodes, each with an Executor,
// and lets the harness give orders to each of them. Ranks of a node reach each other's memory as ranks from Python do; nodes
// are joined over loopback TCP. TREES are the parents of all nodes in both trees ("-1,0/1,-1"), ROUTES rows of an allreduce
// by trees: bytes at most, and bytes of a chunk ("65536:16384/0:262144"; 0: of any size).
#include <arpa/inet.h>
#include <linux/futex.h>
#include <netinet/tcp.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <sstream>
#include <string>
#include <vector>

#include "fireflyer/collectives/executor.hpp"
#include "orders.h"

namespace {

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
    dtype_ = ff::dtype_from_name(std::string(dtype) == "fp32" ? "f32" : std::string(dtype) == "fp16" ? "f16"
                                                                                                     : dtype);
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
        // one that is late may find a later number: rank 0 does not wait for it
        while (board->word.load() < number) futex(FUTEX_WAIT, number - 1);
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

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream rest(text);
  for (std::string part; std::getline(rest, part, separator);) parts.push_back(part);
  return parts;
}

std::vector<std::vector<int>> trees_of(const std::string& text) {
  std::vector<std::vector<int>> trees;
  for (const std::string& tree : split(text, '/')) {
    trees.emplace_back();
    for (const std::string& parent : split(tree, ',')) trees.back().push_back(std::stoi(parent));
  }
  return trees;
}

std::vector<ff::Route> routes_of(const std::string& text) {
  std::vector<ff::Route> routes;
  for (const std::string& row : split(text, '/')) {
    const std::uint64_t up_to = std::stoull(row);
    routes.push_back({ff::OpKind::allreduce, up_to == 0 ? ff::never : up_to, ff::Algorithm::double_binary_tree, std::stoull(row.substr(row.find(':') + 1))});
  }
  return routes;
}

std::pair<int, int> pair_over_tcp() {
  const int listener = socket(AF_INET, SOCK_STREAM, 0), caller = socket(AF_INET, SOCK_STREAM, 0), on = 1;
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* at = reinterpret_cast<sockaddr*>(&address);
  if (bind(listener, at, size) != 0 || listen(listener, 1) != 0 || getsockname(listener, at, &size) != 0 || connect(caller, at, size) != 0) die("loopback TCP");
  const int called = accept(listener, nullptr, nullptr);
  for (const int fd : {caller, called}) {
    if (setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) != 0) die("TCP_NODELAY");
  }
  close(listener);
  return {caller, called};
}

// Opened for all ranks before any is forked; each then closes what is the others..
std::vector<ff::Config> configs_of(int nodes, int ranks, std::uint32_t slots, const std::string& trees, const std::string& routes) {
  ff::Group group;
  group.timeout_ns = timeout_ns;
  group.trees = trees_of(trees);
  group.routes = routes_of(routes);
  for (int r = 0; r < nodes * ranks; ++r) group.node_of_rank.push_back(r / ranks), group.labels.push_back("rank " + std::to_string(r));
  std::size_t chunk_bytes = 0;
  for (const ff::Route& route : group.routes) chunk_bytes = std::max(chunk_bytes, route.chunk_bytes);
  std::vector<ff::Config> configs(group.node_of_rank.size());
  for (int r = 0; r < nodes * ranks; ++r) {
    ff::Config& config = configs[static_cast<std::size_t>(r)];
    config.group = group;
    config.group.rank = r;
    const int leader = r / ranks * ranks;
    ff::Config& leaders = configs[static_cast<std::size_t>(leader)];
    config.window_fd = r == leader ? ff::Window::create(ranks, slots, chunk_bytes) : dup(leaders.window_fd);
    config.doorbell_fd = r == leader ? eventfd(0, EFD_NONBLOCK) : dup(leaders.doorbell_fd);
    if (r == leader) continue;
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0) die("socketpair");
    leaders.local_fds.emplace_back(r, pair[0]);
    config.leader_fd = pair[1];
  }
  const auto join = [&](int channel, int a, int b) {
    const auto [x, y] = pair_over_tcp();
    configs[static_cast<std::size_t>(a * ranks)].connections.push_back({channel, b, 0, x});
    configs[static_cast<std::size_t>(b * ranks)].connections.push_back({channel, a, 0, y});
  };
  for (int a = 0; a < nodes && nodes > 1; ++a) {
    for (int b = 0; b < a; ++b) {
      const auto near = [&](const std::vector<int>& tree) { return tree[static_cast<std::size_t>(a)] == b || tree[static_cast<std::size_t>(b)] == a; };
      for (int lane = 0; lane < ff::lanes; ++lane) {
        if (near(group.trees[static_cast<std::size_t>(lane)])) join(lane, a, b);
      }
      if (std::any_of(group.trees.begin(), group.trees.end(), near)) join(ff::control_channel, a, b);
    }
  }
  return configs;
}

void close_all(const ff::Config& config) {
  for (const int fd : {config.window_fd, config.doorbell_fd, config.leader_fd}) {
    if (fd >= 0) close(fd);
  }
  for (const auto& [rank, fd] : config.local_fds) close(fd);
  for (const ff::Connection& connection : config.connections) close(connection.fd);
}

// Tells the other ranks of the node how to reach this one's memory, and waits until all have said so.
void meet(ff::Config& config, int ranks) {
  board->probes[config.group.rank] = ff::memory_probe();
  for (++board->ready; board->ready < config.group.world_size();) usleep(100);
  const int leader = config.group.rank / ranks * ranks;
  for (int r = leader; r < leader + ranks; ++r) config.local_peers.push_back({board->probes[r], -1});
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 7) return 2;
  board = static_cast<Board*>(mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  if (board == MAP_FAILED) die("mmap");
  const int nodes = std::atoi(argv[2]), ranks = std::atoi(argv[3]), all = nodes * ranks;
  if (all < 1 || all > ff::max_local_ranks) return 2;
  std::vector<ff::Config> configs = configs_of(nodes, ranks, static_cast<std::uint32_t>(std::atoi(argv[4])), argv[5], argv[6]);
  int rank = 0;
  while (rank < all && fork() != 0) ++rank;
  for (int other = 0; other < all; ++other) {
    if (other != rank) close_all(configs[static_cast<std::size_t>(other)]);
  }
  if (rank == all) {  // the parent only waits
    int status, failures = 0;
    while (wait(&status) > 0) failures += status != 0;
    return failures;
  }
  const ff::OpenMemory open;  // before any other rank looks whether it may read this one's
  meet(configs[static_cast<std::size_t>(rank)], ranks);
  Rank self(rank, all, std::move(configs[static_cast<std::size_t>(rank)]));
  orders_open(argv[1], rank, "");
  self.obey();
  return 0;
}

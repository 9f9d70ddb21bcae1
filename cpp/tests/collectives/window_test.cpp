// Shared memory that a broken rank of the node writes into: what was checked stays as it was, and no address follows from it.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>

#include "executor_group.hpp"

namespace {

// The same memory as another rank maps it.
struct Twin {
  explicit Twin(int fd) : control(static_cast<ff::Control*>(mmap(nullptr, sizeof(ff::Control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0))) { CHECK(control != MAP_FAILED); }
  ~Twin() { munmap(control, sizeof(ff::Control)); }
  Twin(const Twin&) = delete;
  Twin& operator=(const Twin&) = delete;
  ff::Control* control;
};

void sizes_are_read_once() {
  const int fd = ff::Window::create(2, 4, 4096);
  const ff::Window window(fd, -1);
  const Twin twin(fd);
  char* const input = window.input(5, 1);
  twin.control->local_ranks = 60;
  twin.control->slots = 31;
  twin.control->chunk_bytes = 1 << 30;
  twin.control->total_bytes = 4096;
  CHECK(window.ranks() == 2 && window.slots() == 4 && window.chunk_bytes() == 4096 && window.input(5, 1) == input);
  CHECK(window.network() == 2);
  close(fd);
}

// Descriptors of another rank's memory: what is refused must not have been filled with pages first.
void what_is_no_window_takes_no_memory() {
  const int fd = memfd_create("large", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  CHECK(fd >= 0 && ftruncate(fd, off_t{256} << 20) == 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0);
  bool thrown = false;
  try {
    const ff::Window window(fd, -1);
  } catch (const std::runtime_error&) {
    thrown = true;
  }
  struct stat info{};
  CHECK(thrown && fstat(fd, &info) == 0 && info.st_blocks * 512 < 1 << 20);
  close(fd);
}

void wrong_sizes_are_refused() {
  const auto refused = [](const std::function<void(ff::Control&)>& change) {
    const int fd = ff::Window::create(2, 4, 4096);
    change(*Twin(fd).control);
    bool thrown = false;
    try {
      const ff::Window window(fd, -1);
    } catch (const std::runtime_error&) {
      thrown = true;
    }
    close(fd);
    return thrown;
  };
  CHECK(!refused([](ff::Control&) {}));
  CHECK(refused([](ff::Control& c) { c.local_ranks = 3; }));
  CHECK(refused([](ff::Control& c) { c.slots = 5; }));
  CHECK(refused([](ff::Control& c) { c.chunk_bytes = 0; }));
  CHECK(refused([](ff::Control& c) { c.chunk_bytes = ff::never; }));  // which a page more makes 0
  for (const std::size_t bytes : {std::size_t{0}, ff::max_chunk_bytes + 1, static_cast<std::size_t>(ff::never)}) {
    bool thrown = false;
    try {
      close(ff::Window::create(2, 4, bytes));
    } catch (const std::invalid_argument&) {
      thrown = true;
    }
    CHECK(thrown);
  }
}

// A window without slots, whose ring and chunks come to as many bytes as there are.
void a_chunk_of_all_addresses_is_refused() {
  const int small = ff::Window::create(2, 2, 4096);
  const Twin twin(small);
  const std::size_t slots_bytes = std::size_t{4096} * 4 * 2, total = twin.control->total_bytes - slots_bytes;
  const int fd = memfd_create("hostile", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  CHECK(fd >= 0 && ftruncate(fd, static_cast<off_t>(total)) == 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0);
  {
    const Twin mine(fd);
    mine.control->magic = twin.control->magic;
    mine.control->local_ranks = 2;
    mine.control->slots = 2;
    mine.control->chunk_bytes = ff::never;
    mine.control->total_bytes = total;
  }
  bool thrown = false;
  try {
    const ff::Window window(fd, -1);
  } catch (const std::runtime_error&) {
    thrown = true;
  }
  CHECK(thrown);
  close(fd);
  close(small);
}

void nonsense_is_told_as_such() {
  const int fd = ff::Window::create(2, 4, 4096);
  const ff::Window window(fd, -1);
  const Twin twin(fd);
  for (const std::uint64_t call : {ff::never, std::uint64_t{1} << 16 | 200, std::uint64_t{1} << 16 | 9 << 8}) {
    twin.control->lines[1].signature[3][1].store(call);
    CHECK(window.signature(1, 3).describe().find("unknown operation #3") == 0);
  }
  CHECK(window.fail({ff::FailureKind::aborted, 1, 7, "enough"}));
  twin.control->failure_kind.store(77);
  twin.control->failure_culprit.store(INT_MIN);
  std::fill_n(twin.control->failure_text, ff::max_failure_text, '\xff');
  const ff::Failure failure = window.failure();
  CHECK(failure.kind == ff::FailureKind::peer_failed && failure.culprit == -1 && failure.text.find('\xff') == std::string::npos);
  close(fd);
}

// What a rank has told the others about its arrays is not what it works with itself.
void a_rank_works_on_its_own_arrays_whatever_the_window_says() {
  std::vector<ff::Config> configs = configs_of({.node_of_rank = {0, 0}, .timeout_ns = 20 * second, .memory = Memory::foreign});
  const Twin twin(configs[0].window_fd);
  if (configs[0].local_peers[0].probe.pid == 0) return;
  Ranks ranks;
  for (auto& config : configs) ranks.push_back(std::make_unique<ff::Executor>(std::move(config)));
  constexpr std::size_t count = 40'000;
  std::vector<float> victim(count, 5.0F), first(count, 1.0F), other(count, 2.0F);
  const ff::OpDescriptor op{0, count, ff::OpKind::allreduce, ff::DType::f32, -1};
  const auto waits = ranks[0]->submit(op, first.data(), first.data());
  ff::Line& line = twin.control->lines[0];
  while (line.entered.load() == 0) std::this_thread::yield();
  line.signature[0][2].store(reinterpret_cast<std::uint64_t>(victim.data()));
  line.signature[0][3].store(reinterpret_cast<std::uint64_t>(victim.data()));
  twin.control->lines[1].entered.store(1);
  line.signature[0][0].store(count);
  twin.control->lines[1].signature[0][0].store(count);
  twin.control->lines[1].signature[0][1].store(ff::call_of(op));
  twin.control->lines[1].signature[0][2].store(reinterpret_cast<std::uint64_t>(other.data()));
  twin.control->lines[1].signature[0][3].store(reinterpret_cast<std::uint64_t>(other.data()));
  twin.control->lines[1].signature[0][4].store(ff::never);
  twin.control->lines[1].signature[0][5].store(ff::never);
  twin.control->lines[1].count[ff::counter_reduced].store(2);
  twin.control->lines[1].count[ff::counter_entered].store(1);
  expect_well(*waits);
  CHECK(first[0] == 3.0F && other[0] == 3.0F && victim[0] == 5.0F);
  for (auto& rank : ranks) rank->abort("over");
  close_all(ranks);
}

// The count of pieces that any rank may take is set back to before the operation.
void a_pool_that_goes_back_is_refused() {
  std::vector<ff::Config> configs = configs_of({.node_of_rank = {0, 0, 1, 1}, .timeout_ns = 20 * second, .memory = Memory::arenas});
  const int fd = dup(configs[0].window_fd);
  const Twin twin(fd);
  std::vector<std::shared_ptr<ff::Arena>> arenas;
  for (const auto& config : configs) arenas.push_back(config.arena);
  Ranks ranks;
  for (auto& config : configs) ranks.push_back(std::make_unique<ff::Executor>(std::move(config)));
  constexpr std::size_t count = 200'000;
  std::vector<float*> arrays;
  for (const auto& arena : arenas) arrays.push_back(reinterpret_cast<float*>(arena->allocate(count * 4)));
  const auto call = [&](std::size_t r) { return ranks[r]->submit({0, count, ff::OpKind::allreduce, ff::DType::f32, -1}, arrays[r], arrays[r]); };
  for (int round = 0;; ++round) {
    std::vector<std::shared_ptr<ff::Work>> works;
    for (std::size_t r = 0; r < ranks.size(); ++r) works.push_back(call(r));
    while (round > 0 && !works[0]->wait(0)) twin.control->pools[0].next.store(0);
    ff::FailureKind kind = ff::FailureKind::none;
    for (const auto& work : works) {
      CHECK(work->wait(60 * second));
      if (work->failure().kind != ff::FailureKind::none) kind = work->failure().kind;
    }
    if (kind == ff::FailureKind::none) continue;
    CHECK(kind == ff::FailureKind::peer_failed && works[0]->failure().culprit == -1);
    CHECK(works[0]->failure().text.find("damaged the shared memory") != std::string::npos);
    break;
  }
  close_all(ranks);
  close(fd);
}

}  // namespace

int main() {
  sizes_are_read_once();
  what_is_no_window_takes_no_memory();
  wrong_sizes_are_refused();
  a_chunk_of_all_addresses_is_refused();
  nonsense_is_told_as_such();
  a_rank_works_on_its_own_arrays_whatever_the_window_says();
  a_pool_that_goes_back_is_refused();
  std::puts("window: all well");
  return 0;
}

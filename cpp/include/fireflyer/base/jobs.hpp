// Threads that do one job after the other, in the order in which they were asked for.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace ff {

class JobThreads {
 public:
  using Job = std::function<void()>;

  explicit JobThreads(int threads) {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
  }
  ~JobThreads() { close(); }
  JobThreads(const JobThreads&) = delete;
  JobThreads& operator=(const JobThreads&) = delete;

  // False: it is closed, and the job will not be done.
  bool run(Job job) {
    {
      const std::lock_guard lock(mutex_);
      if (closing_) return false;
      jobs_.push_back(std::move(job));
    }
    has_job_.notify_one();
    return true;
  }

  // All jobs are done when this returns.
  void close() {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    has_job_.notify_all();
    for (std::thread& thread : std::exchange(threads_, {})) thread.join();
  }

  std::size_t waiting() const {
    const std::lock_guard lock(mutex_);
    return jobs_.size();
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      has_job_.wait(lock, [this] { return closing_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      Job job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      job();
      job = nullptr;  // what it holds may take locks when it goes
      lock.lock();
    }
  }

  mutable std::mutex mutex_;
  std::condition_variable has_job_;
  std::deque<Job> jobs_;
  bool closing_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace ff

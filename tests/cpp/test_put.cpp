// All-reduces by schedules in memory that all ranks map: there they put results into each other's.
#include <deque>
#include <random>

#include "engines.h"

using namespace farandole;
using testing::error_of;
using testing::run_groups;

namespace {

/// One all-reduce as one rank sees it; in place, the output is where the input was.
class Puts {
 public:
  Puts(const std::shared_ptr<Group>& group, size_t count, bool in_place, int salt)
      : size_(group->size()),
        salt_(salt),
        input_(group->allocate(count * sizeof(int32_t))),
        output_(in_place ? input_ : group->allocate(count * sizeof(int32_t))),
        count_(count) {
    for (size_t i = 0; i < count; ++i) values(output_)[i] = -1;
    for (size_t i = 0; i < count; ++i) values(input_)[i] = value(group->rank(), i);
  }

  void submit(Group& group, std::string algorithm) {
    Options options{{Collective::all_reduce}};
    options.level = Determinism::fast;
    options.algorithm = std::move(algorithm);
    handle_ = group.submit({input_.get(), count_, DType::int32},
                           {output_.get(), count_, DType::int32}, std::move(options));
  }

  /// Then the memory is this rank's own again, and it writes there at once.
  void check() {
    const testing::Note note("all_reduce of ", count_);
    CHECK_EQUAL(error_of(handle_), "");
    size_t wrong = 0;
    for (size_t i = 0; i < count_; ++i) {
      int32_t expected = 0;
      for (int from = 0; from < size_; ++from) expected += value(from, i);
      wrong += values(output_)[i] != expected;
      values(output_)[i] = -2;
    }
    CHECK_EQUAL(wrong, 0U);
  }

 private:
  static int32_t* values(const std::shared_ptr<std::byte>& memory) {
    return reinterpret_cast<int32_t*>(memory.get());
  }
  int32_t value(int rank, size_t i) const {
    return static_cast<int32_t>((i + static_cast<size_t>(rank * 17 + salt_ * 31)) % 1009);
  }

  int size_, salt_;
  std::shared_ptr<std::byte> input_, output_;
  size_t count_;
  Handle handle_;
};

}  // namespace

TEST(ranks_put_results_only_where_nobody_reads_any_more) {
  // About the least that is put, whole and odd, and the most.
  constexpr size_t counts[] = {16'383, 16'384, 33'333, 131'072, 262'144, 262'145};
  const std::string algorithms[] = {"ring", "halving_doubling"};
  for (const int size : {2, 3, 4})
    run_groups(size, ProgressMode::thread, [&](const std::shared_ptr<Group>& group) {
      std::mt19937 random(static_cast<unsigned>(size));  // the same on all ranks
      std::deque<Puts> works;
      for (int i = 0; i < 60; ++i) {
        works.emplace_back(group, counts[random() % std::size(counts)], random() % 2 == 0, i);
        works.back().submit(*group, algorithms[random() % 2]);
        if (works.size() < 3) continue;
        works.front().check();
        works.pop_front();
      }
      for (Puts& work : works) work.check();
    });
}

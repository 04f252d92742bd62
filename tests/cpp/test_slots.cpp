// Slots that ranks lend each other: whatever was in one before has been read when it is written.
#include "engines.h"
#include "schedule/routes.h"
#include "schedule/slicing.h"

#include <deque>
#include <random>

using namespace farandole;
using testing::buffer_of;
using testing::error_of;
using testing::run_groups;

namespace {

constexpr Collective kKinds[] = {
    Collective::all_reduce, Collective::reduce_scatter, Collective::all_gather,
    Collective::all_to_all, Collective::broadcast,      Collective::reduce,
    Collective::gather,     Collective::scatter,
};

/// One operation as one rank sees it, on memory of its own.
class Work {
 public:
  Work(const std::shared_ptr<Group>& group, Collective kind, size_t count, int root, int salt)
      : kind_(kind), salt_(salt) {
    shape_.rank = group->rank();
    shape_.size = group->size();
    shape_.count = count;
    shape_.root = root;
    const Sizes sizes = sizes_of(kind, shape_);
    for (size_t i = 0; i < sizes.input; ++i) input_.push_back(value(shape_.rank, i));
    output_.assign(sizes.output, -1);
  }

  void submit(Group& group, std::string path) {
    Options options{{kind_}};
    options.root = shape_.root;
    options.algorithm = std::move(path);
    handle_ = group.submit(buffer_of(input_, DType::int32), buffer_of(output_, DType::int32),
                           std::move(options));
  }

  void check() {
    const testing::Note note(name_of(kind_), " of ", shape_.count);
    CHECK_EQUAL(error_of(handle_), "");
    std::vector<int32_t> expected(output_.size(), 0);
    for (int from = 0; from < shape_.size; ++from) {
      const Route r = route(kind_, shape_, from, shape_.rank);
      for (size_t i = 0; i < r.take.count; ++i)
        expected[r.put.offset + i] += value(from, r.take.offset + i);
    }
    CHECK(output_ == expected);
  }

 private:
  int32_t value(int rank, size_t i) const {
    return static_cast<int32_t>((i + static_cast<size_t>(rank * 17 + salt_ * 31)) % 1009);
  }

  Collective kind_;
  int salt_;
  Shape shape_;
  std::vector<int32_t> input_, output_;
  Handle handle_;
};

}  // namespace

TEST(slots_are_written_again_only_when_all_have_read_them) {
  constexpr size_t kSizes[] = {1, 100, 4'000, 40'000, 150'000};  // of 32 KiB at most by one_shot
  for (const int size : {2, 3, 4})
    run_groups(size, ProgressMode::thread, [&](const std::shared_ptr<Group>& group) {
      std::mt19937 random(static_cast<unsigned>(size));  // the same on all ranks
      std::deque<Work> works;
      for (int i = 0; i < 150; ++i) {
        const Collective kind = kKinds[random() % std::size(kKinds)];
        const bool by_one_shot = random() % 2 == 0;
        const size_t count = i % 50 == 49 ? 2'200'000 : kSizes[random() % (by_one_shot ? 3 : 5)];
        const bool fits = by_one_shot && count <= 4'000 / static_cast<size_t>(size);
        works.emplace_back(group, i % 50 == 49 ? Collective::all_reduce : kind, count,
                           static_cast<int>(random() % static_cast<unsigned>(size)), i);
        works.back().submit(*group, fits ? "one_shot" : "cico");
        if (works.size() < 5) continue;  // so many at once: ranks run ahead of each other
        works.front().check();
        works.pop_front();
      }
      for (Work& work : works) work.check();
    });
}

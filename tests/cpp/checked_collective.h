// A collective of exact numbers as one rank gives it in, and what it must become.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "engines.h"
#include "schedule/routes.h"
#include "schedule/slicing.h"

namespace testing {

inline constexpr farandole::Collective kDataCollectives[] = {
    farandole::Collective::all_reduce, farandole::Collective::reduce_scatter,
    farandole::Collective::all_gather, farandole::Collective::all_to_all,
    farandole::Collective::broadcast,  farandole::Collective::reduce,
    farandole::Collective::gather,     farandole::Collective::scatter,
};

/// On memory of its own. `salt` makes the numbers of one operation differ from the next one's.
class CheckedCollective {
 public:
  CheckedCollective(const std::shared_ptr<farandole::Group>& group, farandole::Collective kind,
                    size_t count, int root, int salt)
      : kind_(kind), salt_(salt) {
    shape_.rank = group->rank();
    shape_.size = group->size();
    shape_.count = count;
    shape_.root = root;
    const farandole::Sizes sizes = farandole::sizes_of(kind, shape_);
    for (size_t i = 0; i < sizes.input; ++i) input_.push_back(value(shape_.rank, i));
    output_.assign(sizes.output, -1);
  }

  void submit(farandole::Group& group, std::string path) {
    farandole::Options options{{kind_}};
    options.root = shape_.root;
    options.algorithm = std::move(path);
    handle_ = group.submit(buffer_of(input_, farandole::DType::int32),
                           buffer_of(output_, farandole::DType::int32), std::move(options));
  }

  void check() {
    const Note note(farandole::name_of(kind_), " of ", shape_.count);
    CHECK_EQUAL(error_of(handle_), "");
    std::vector<int32_t> expected(output_.size(), 0);
    for (int from = 0; from < shape_.size; ++from) {
      const farandole::Route r = farandole::route(kind_, shape_, from, shape_.rank);
      for (size_t i = 0; i < r.take.count; ++i)
        expected[r.put.offset + i] += value(from, r.take.offset + i);
    }
    CHECK(output_ == expected);
  }

 private:
  int32_t value(int rank, size_t i) const {
    return static_cast<int32_t>((i + static_cast<size_t>(rank * 17 + salt_ * 31)) % 1009);
  }

  farandole::Collective kind_;
  int salt_;
  farandole::Shape shape_;
  std::vector<int32_t> input_, output_;
  farandole::Handle handle_;
};

}  // namespace testing
